"""Every family's greedy output is that of transformers' own generate, whatever drafts for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from peagle.checkpoints.targets import has_native_target, load_adapted, load_target
from peagle.engine.request import Request
from peagle.engine.scheduler import Schedule
from peagle.models.drafter import Drafter
from peagle.models.ngram import NgramDrafter
from peagle.models.target import TargetModel
from tests.tiny import drafters, engines
from tests.tiny.families import ADAPTED, FAMILIES, RECOMPUTED
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW, VOCAB, head_drafter, save_reference

# One of each; windows are 7 wide, answers end far behind them.
NAMES = (
    *("llama", "mistral-window", "qwen2-window", "qwen3", "qwen3-moe-dense-layers", "mixtral"),
    *("gpt-oss", "gemma2", "gemma3", "gemma4", "gemma4-moe", "phi3", "olmo2", "granite"),
)
NUM_TOKENS = 20
PROMPTS = [*prompts(2, seed=5), [(7 * n) % VOCAB for n in range(30)]]
PARAMS = dataclasses.replace(GREEDY, max_tokens=NUM_TOKENS)


class Model(NamedTuple):
    target: TargetModel
    answers: list[list[int]]  # by transformers


SLOW = [pytest.param("qwen3-next", marks=pytest.mark.slow)]
OTHERS = [*ADAPTED, *(name for name in RECOMPUTED if name != "qwen3-next"), *SLOW]


@pytest.fixture(scope="module", params=[*NAMES, *OTHERS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("model")
    family = (FAMILIES | ADAPTED | RECOMPUTED)[request.param]
    reference = save_reference(folder, family(vocab_size=VOCAB, max_position_embeddings=96))
    is_native = request.param in NAMES
    assert has_native_target(folder) == is_native
    load = load_target if is_native else load_adapted
    target = load(folder, dtype=torch.float32, device=torch.device("cpu"))
    assert target.rolls_back == (request.param not in RECOMPUTED)
    return Model(target, [generated(reference, prompt) for prompt in PROMPTS])


def generated(reference: Any, prompt: Sequence[int]) -> list[int]:
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_TOKENS}
    output = reference.generate(ids, do_sample=False, **options)
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def run(model: Model, drafter: Drafter | None, k: int, **options: Any) -> list[Request]:
    if not model.target.rolls_back:
        options["static"] = False  # it asks the host where each sequence lies
    engine = engines.make_engine(model.target, drafter, k, **options)
    jobs = [Job(prompt, PARAMS, joins=n) for n, prompt in enumerate(PROMPTS)]
    requests = engines.run(engine, jobs)
    assert engines.answers_of(requests) == model.answers
    return requests


def accepted(requests: Sequence[Request]) -> int:
    return sum(r.stats.num_accepted_tokens for r in requests)


def known(model: Model) -> list[list[int]]:
    return [p + a for p, a in zip(PROMPTS, model.answers, strict=True)]


@engines.both_forms
def test_plain_and_with_drafts_from_the_host(model: Model, static: bool) -> None:
    if static and not model.target.rolls_back:
        pytest.skip("rows are exact")
    assert len({tuple(a) for a in model.answers}) == len(PROMPTS)
    run(model, None, 0, static=static)
    if not static:
        run(model, NgramDrafter(1, 3), 5)
    assert accepted(run(model, drafters.mixed(known(model)), 8, static=static)) > 0


@pytest.mark.parametrize(("method", "k", "static"), [("p-eagle", 3, True), ("eagle3", 2, False)])
def test_with_a_head_that_reads_its_hidden_states(
    model: Model, method: str, k: int, static: bool
) -> None:
    network = SHALLOW.make_head(model.target, method)
    run(model, head_drafter(network), 1, static=not static)
    head = drafters.ScriptedHead(network, drafters.Script(known(model)))
    assert accepted(run(model, head, k, static=static)) > 0


@engines.both_forms
def test_with_trees(model: Model, static: bool) -> None:
    if not model.target.rolls_back:
        pytest.skip("drafts are chains")
    network = SHALLOW.make_head(model.target)
    tree = drafters.ScriptedTrees(network, known(model), ranks=(0, 1, 8))
    assert accepted(run(model, tree, 6, nodes=12, static=static)) > 0
    if static:
        network = SHALLOW.make_head(model.target, "eagle3")
        tree = drafters.ScriptedBeam(network, known(model), ranks=(0, 1, 8))
        assert accepted(run(model, tree, 3, nodes=12, static=static)) > 0


def test_when_a_request_begins_as_an_earlier_one_did(model: Model) -> None:
    """Its first blocks are in the cache; of a target that computes again, as token ids."""
    drafter = head_drafter(SHALLOW.make_head(model.target))
    engine = engines.make_engine(model.target, drafter, 3, enable_prefix_caching=True)
    first, second = engines.run(engine, [Job(PROMPTS[2], PARAMS, joins=n) for n in (0, 40)])
    assert engines.answers_of([first, second]) == [model.answers[2]] * 2
    assert second.num_cached_tokens > first.num_cached_tokens == 0


def test_when_requests_are_preempted(model: Model) -> None:
    """At any time: those with windows need so little memory that it would not run short."""
    engine = engines.make_engine(model.target, drafters.mixed(known(model)), 4, max_model_len=52)
    scheduler, num_steps = engine.scheduler, 0
    schedule = scheduler.schedule

    def preempting() -> Schedule:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 5 == 0 and scheduler.running:
            scheduler._preempt(next(reversed(scheduler.running.values())))
        return schedule()

    scheduler.schedule = preempting  # type: ignore[method-assign]
    jobs = [Job(prompt, PARAMS, joins=n) for n, prompt in enumerate(PROMPTS)]
    requests = engines.run(engine, jobs)
    assert engines.answers_of(requests) == model.answers
    assert sum(r.num_preemptions for r in requests) > 0
