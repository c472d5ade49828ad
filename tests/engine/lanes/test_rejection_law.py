"""By rejection, what lanes say has the target's law; on a GPU the captured steps say it, too."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from peagle.config import EngineConfig
from peagle.engine.engine import Speculation
from peagle.engine.kv_cache import slot_bytes
from peagle.engine.lanes.engine import LaneEngine
from peagle.engine.runner import target_layout
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams

from .. import tiny
from ..test_sampled_law import SMALL_VOCAB, deviation, exact_law
from ..tiny import Job
from .test_equals_plain import HEADS, MODES

PROMPT, LENGTH = [1, 2, 0, 3, 1, 2, 0], 3
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "p-eagle": ({}, {}),
    "p-eagle, reduced vocabulary": ({"draft_vocab_size": 3}, {"temperature": 1.3}),
    "eagle3, filtered": ({"method": "eagle3"}, {"temperature": 0.8, "top_k": 3}),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def models(device: str, head: dict[str, Any], **changes: Any) -> tuple[TargetModel, Drafter]:
    target = tiny.make_target(torch.float32, **changes)
    network = tiny.make_head(target, **head)
    return target.to(device), tiny.head_drafter(network.to(device))


def lanes(target: TargetModel, drafter: Drafter, k: int, **options: Any) -> LaneEngine:
    """As the engine is built, without anything that watches it: a GPU's steps are captured."""
    config = EngineConfig(**{"max_num_seqs": 64, "block_size": 4} | options)
    return LaneEngine(target, config, speculation=Speculation(drafter, k, "rejection"))


def check_law(engine: LaneEngine, params: SamplingParams, samples: int) -> int:
    """Requests without a seed, every third one greedy; -> how many of them were preempted."""
    greedy = SamplingParams(temperature=0.0, max_tokens=params.max_tokens)
    requests = [
        engine.add_request(str(n), PROMPT, params if n % 3 else greedy)
        for n in range(samples * 3 // 2)
    ]
    while engine.has_unfinished:
        engine.step()
    assert 0.05 < engine.stats.acceptance_rate < 0.98  # both branches were taken
    assert len({tuple(r.output_token_ids) for r in requests[::3]}) == 1
    sampled = [r for n, r in enumerate(requests) if n % 3]
    seen = Counter(tuple(r.output_token_ids[:LENGTH]) for r in sampled)
    law = exact_law(PROMPT, LENGTH, params)
    assert all(law[tokens] > 0 for tokens in seen)
    assert abs(deviation(seen, law)) < 5
    return sum(r.num_preemptions > 0 for r in requests)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_answers_have_the_targets_law_beside_greedy_ones(name: str, device: str) -> None:
    head, mode = CASES[name]
    target, drafter = models(device, head, vocab_size=SMALL_VOCAB)
    # One token more than is looked at, so that the last of them is drafted for, too.
    check_law(lanes(target, drafter, 2), SamplingParams(max_tokens=LENGTH + 1, **mode), 1000)


def test_preemption_leaves_the_law_alone() -> None:
    """What a step in flight would have said is lost, and drawn again."""
    target, drafter = models("cpu", {}, vocab_size=SMALL_VOCAB)
    assert drafter.cache_layout is not None
    layouts = (target_layout(target), drafter.cache_layout)
    num_bytes = 150 * sum(slot_bytes(layout, torch.float32) for layout in layouts)
    options = {"kv_cache_memory_bytes": num_bytes, "max_model_len": 24, "block_size": 1}
    params = SamplingParams(max_tokens=LENGTH + 6)
    assert check_law(lanes(target, drafter, 2, **options), params, 300) > 50


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "mixed") for name in HEADS), ("p-eagle", "sampled"), ("eagle3", "sampled")],
)
def test_captured_steps_give_the_plain_steps_tokens(name: str, mode: str) -> None:
    """The plain engine on a CPU, float32: only a near tie of a coin could tell them apart."""
    k = 1 + list(HEADS).index(name) % 3 * 3  # 1, 4, 7
    params, texts = MODES[mode], tiny.prompts(6, seed=1, longest=24)
    jobs = [Job(p, params[n % len(params)], joins=n) for n, p in enumerate(texts)]
    engine = lanes(*models("cuda", HEADS[name]), k, max_num_seqs=8)
    plain = tiny.make_engine(*models("cpu", HEADS[name]), k, "rejection")
    ours, theirs = tiny.run(engine, jobs), tiny.run(plain, jobs)
    assert tiny.answers_of(ours) == tiny.answers_of(theirs)
    assert engine.stats.num_accepted_tokens == plain.stats.num_accepted_tokens
    assert any(shape.by_rejection for shape in engine.steps._decode)
    assert engine.stats.draft_time == 0.0  # nobody took the plain step
