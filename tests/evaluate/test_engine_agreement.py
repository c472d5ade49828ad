"""Offline acceptance is what the engine reports on the same prompts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from peagle.checkpoints.heads.loading import load_head
from peagle.config import EngineConfig, Verification
from peagle.data.dataset import Dataset, DatasetWriter, Row
from peagle.data.packing import pack
from peagle.engine.engine import Engine, Speculation
from peagle.engine.request import DraftTree, Request
from peagle.evaluate import contexts
from peagle.evaluate.beams import BeamLattices
from peagle.evaluate.evaluator import Evaluator
from peagle.evaluate.recall import evaluate_greedy
from peagle.evaluate.sampled import SampledAcceptance, evaluate_sampled
from peagle.evaluate.trees import evaluate_trees
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats
from peagle.speculation.trees import MAX_BEAM_DEPTH, depths, grow_tree, limited
from peagle.teacher_forcing.draft_model import DraftModel, autocast
from peagle.teacher_forcing.features import OnlineFeatures
from peagle.train.loop import TrainingRun
from peagle.train.setup import assemble
from tests.tiny import training
from tests.tiny.models import DEEP, ROPE, head_drafter

K = 4
AUX_LAYERS = (2, 3, 5)
EOS = (5, 17, 23)  # common enough that some answers end by them
GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [
    torch.randint(training.VOCAB, (1 + n % 7,), generator=GENERATOR).tolist() for n in range(16)
]


@cache
def target() -> TargetModel:
    return DEEP.make_target(torch.float64)


def run_engine(
    network: EagleNetwork,
    k: int,
    params: SamplingParams,
    verification: Verification = "coupled",
    copies: int = 1,
    num_draft_nodes: int | None = None,
    steps: list[Step] | None = None,
    **config: Any,
) -> tuple[list[Request], SpecDecodeStats]:
    """`steps`: gets each step that verified drafts."""
    engine = Engine(
        target(),
        EngineConfig(max_num_seqs=8, **config),
        eos_token_ids=EOS,
        speculation=Speculation(head_drafter(network), k, verification, num_draft_nodes),
    )
    requests = [
        engine.add_request(str(n), prompt, params, seed=n)
        for n, prompt in enumerate(PROMPTS * copies)
    ]
    while engine.has_unfinished:
        before = [(r.num_tokens, _drafted(r)) for r in requests]
        engine.step()
        for request, (num_tokens, (drafts, accepted)) in zip(requests, before, strict=True):
            now = _drafted(request)
            if steps is not None and now[0] > drafts:
                steps.append(Step(num_tokens, now[1] - accepted))
    return requests, engine.stats


class Step(NamedTuple):
    num_tokens: int  # of the request when it began
    accepted: int


def _drafted(request: Request) -> tuple[int, int]:
    """Steps with drafts so far, and accepted drafts."""
    return request.stats.num_drafts, request.stats.num_accepted_tokens


def write_answers(folder: Path, requests: list[Request], max_tokens: int) -> Dataset:
    writer = DatasetWriter(folder, {"target": "tiny", "max_tokens": max_tokens})
    for request in requests:
        prompt = len(request.prompt_token_ids)
        mask = [0] * prompt + [1] * request.num_outputs
        writer.add(Row(request.request_id, request.token_ids, mask))
    writer.flush()
    return Dataset(folder)


def evaluator(dataset: Dataset, k: int = K, **options: Any) -> Evaluator:
    return Evaluator(
        dataset,
        list(range(len(dataset))),
        OnlineFeatures(target(), AUX_LAYERS),
        k,
        tokens_per_row=128,
        max_rows=200,
        chunk_rows=50,
        autocast=autocast(torch.device("cpu"), None),
        **options,
    )


def random_head(method: str, **changes: Any) -> EagleNetwork:
    return training.trainable_head(target(), method, **changes).requires_grad_(False)


def trained_head(method: str, folder: Path) -> EagleNetwork:
    """A head that learned the target's own greedy answers, so that many drafts are right."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    requests, _ = run_engine(random_head(method), 1, params)
    write_answers(folder / "data", requests, 40)
    recipe = training.recipe(
        folder,
        head={"method": method},
        data={"held_out_share": 0.0},
        optimizer={"learning_rate": 2e-2},
        schedule={"steps": 45},
    )
    TrainingRun(assemble(recipe, target(), ROPE))()
    head = str(folder / "run" / "head")
    return load_head(head, target(), dtype=torch.float64, device=torch.device("cpu"))


def acceptance(stats: Any) -> dict[str, Any]:
    """The counters that speak of drafts; times and prefill steps are the engine's alone."""
    return {
        k: v for k, v in vars(stats).items() if "draft" in k or "per_pos" in k or "accept" in k
    } | {"draft_time": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *(("p-eagle", kind) for kind in ("random", "trained", "corrected", "windowed")),
        *(("eagle3", kind) for kind in ("random", "trained", "windowed")),
    ],
)
def test_greedy_acceptance_is_the_engines_for_every_k(
    method: str, kind: str, tmp_path: Path
) -> None:
    network = {
        "random": lambda: random_head(method),
        "trained": lambda: trained_head(method, tmp_path),
        "corrected": lambda: random_head(method, correction_size=12),
        "windowed": lambda: random_head(method, sliding_window=9),
    }[kind]()
    params = SamplingParams(temperature=0.0, max_tokens=21)
    runs = [run_engine(network, k, params) for k in range(1, K + 1)]
    requests = runs[0][0]
    reasons = [r.finish_reason for r in requests]
    assert reasons.count("stop") > 3
    assert reasons.count("length") > 3
    dataset = write_answers(tmp_path / "answers", requests, 21)
    result = evaluator(dataset)(DraftModel(network))
    for (again, stats), ours in zip(runs, result.groups["all"], strict=True):
        assert [r.token_ids for r in again] == [r.token_ids for r in requests]
        assert acceptance(ours) == acceptance(stats)
    assert result.acceptance_length(K) > (1.4 if kind == "trained" else 1.0)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *(("p-eagle", kind) for kind in ({}, {"correction_size": 12}, {"sliding_window": 9})),
        *(("eagle3", kind) for kind in ({}, {"sliding_window": 8})),
        ("eagle3", {"draft_vocab_size": 25, "norm_output": True}),
    ],
)
def test_acceptance_of_trees_is_the_engines_for_every_number_of_nodes(
    method: str, changes: dict[str, int], tmp_path: Path
) -> None:
    network = random_head(method, **changes)
    params = SamplingParams(temperature=0.0, max_tokens=21)
    sizes = (1, 3, 7, 20)
    runs = [run_engine(network, K, params, num_draft_nodes=n) for n in sizes]
    dataset = write_answers(tmp_path, runs[0][0], 21)
    result = evaluate_trees(evaluator(dataset), DraftModel(network), max(sizes)).acceptance
    for n, (_, stats) in zip(sizes, runs, strict=True):
        ours = result.groups["all"][n - 1]
        assert (ours.num_drafts, ours.num_accepted_tokens) == (
            stats.num_drafts,
            stats.num_accepted_tokens,
        )
    assert result.acceptance_length(max(sizes)) > result.acceptance_length(1)


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 8, "num_hidden_layers": 2}])
def test_a_beam_at_an_anchor_of_packed_text_is_the_one_that_the_engine_drafts(
    changes: dict[str, int], tmp_path: Path
) -> None:
    """Node by node, where the beam is as deep as it can be."""
    k, num_nodes = MAX_BEAM_DEPTH, 40
    network = random_head("eagle3", **changes)
    network.norm.weight.mul_(2)  # so sure that some paths go all the way down
    speculation = Speculation(head_drafter(network), k, num_draft_nodes=num_nodes)
    engine = Engine(target(), EngineConfig(), eos_token_ids=EOS, speculation=speculation)
    params = SamplingParams(temperature=0.0, max_tokens=21)
    requests = [engine.add_request(str(n), prompt, params) for n, prompt in enumerate(PROMPTS)]
    drafted: list[list[DraftTree]] = [[] for _ in requests]
    for request, trees in zip(requests, drafted, strict=True):
        request.draft_trees = trees
    while engine.has_unfinished:
        engine.step()
    dataset = write_answers(tmp_path, requests, 21)
    model, offline = DraftModel(network), evaluator(dataset, k)
    row = pack(dataset, list(range(len(dataset))), int(dataset.lengths.sum()))
    counts, starts = offline.draft_counts(model, row), dataset.lengths.cumsum(0) - dataset.lengths
    found = [(n, tree) for n, trees in enumerate(drafted) for tree in trees]
    newest = [starts[n] + len(PROMPTS[n]) + tree.num_outputs - 1 for n, tree in found]
    anchors = torch.stack(newest) - 1
    with torch.no_grad():
        lattice = BeamLattices(offline, network, row, counts)(anchors)
    ours = grow_tree(*limited(lattice, counts[anchors]), num_nodes)
    sizes = (ours.scores > -torch.inf).sum(1).tolist()
    for number, (_, tree) in enumerate(found):
        assert ours.token_ids[number, : sizes[number]].tolist() == tree.token_ids
        assert ours.parents[number, : sizes[number]].tolist() == tree.parents
    assert int(depths(ours.parents).max()) == k
    assert min(sizes) < num_nodes == max(sizes)


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_path_that_ends_in_a_leaf_rejects_nothing(method: str, tmp_path: Path) -> None:
    network, num_nodes = random_head(method), 9
    params = SamplingParams(temperature=0.0, max_tokens=21)
    requests, _ = run_engine(network, 1, params)
    dataset = write_answers(tmp_path, requests, 21)
    found = evaluate_trees(evaluator(dataset), DraftModel(network), num_nodes)
    ours = found.acceptance.groups["all"][-1]
    reached, accepted = [0] * K, [0] * K
    speculation = Speculation(head_drafter(network), K, num_draft_nodes=num_nodes)
    engine = Engine(target(), EngineConfig(), eos_token_ids=EOS, speculation=speculation)
    for prompt in PROMPTS:
        request = engine.add_request("x", prompt, params)
        request.draft_trees = trees = []
        while engine.has_unfinished:
            engine.step()
        for tree in trees:
            written = request.output_token_ids[tree.num_outputs :]
            path = tree.accepted[: len(written)]  # the answer may have ended on it
            for depth in range(len(path)):
                accepted[depth] += 1
            last = path[-1] if path else 0
            for depth in range(len(path) + (last in tree.parents)):
                reached[depth] += 1
    assert ours.num_accepted_tokens_per_pos == accepted
    assert ours.num_reached_tokens_per_pos == reached
    assert reached[1] < accepted[0]  # some did


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_acceptance_by_context_is_what_the_engine_counts_at_that_length(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = (6, 12, 18)
    monkeypatch.setattr(contexts, "BOUNDS", bounds)
    monkeypatch.setattr(contexts, "NAMES", ("a", "b", "c", "d"))
    network, num_nodes = random_head(method), 7
    params = SamplingParams(temperature=0.0, max_tokens=21)
    for nodes in (None, num_nodes):
        steps: list[Step] = []
        requests, _ = run_engine(network, K, params, num_draft_nodes=nodes, steps=steps)
        dataset = write_answers(tmp_path / str(nodes), requests, 21)
        model = DraftModel(network)
        if nodes is None:
            found = evaluate_greedy(evaluator(dataset), model).by_context
        else:
            found = evaluate_trees(evaluator(dataset), model, nodes).by_context
        for number, low, high in zip(range(4), (0, *bounds), (*bounds, 99), strict=True):
            own = [step.accepted for step in steps if low <= step.num_tokens < high]
            stats = found.as_steps["all"][number]
            assert (stats.num_drafts, stats.num_accepted_tokens) == (len(own), sum(own))
        per_token = found.per_token["all"]
        assert sum(stats.num_steps for stats in per_token) == sum(
            request.num_outputs - 1 for request in requests
        )
        assert sum(s.num_accepted_tokens for s in per_token) > sum(s.accepted for s in steps) > 0


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("num_nodes", [None, 9])
def test_limits_of_context_and_head_count_as_in_the_engine(
    method: str, num_nodes: int | None, tmp_path: Path
) -> None:
    network = random_head(method, max_position_embeddings=14)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    limits = {"max_model_len": 20}
    requests, stats = run_engine(network, K, params, num_draft_nodes=num_nodes, **limits)
    assert {r.num_tokens for r in requests} == {20}
    offline = evaluator(write_answers(tmp_path, requests, 60), **limits)
    if num_nodes is None:
        ours = offline(DraftModel(network)).groups["all"][K - 1]
        assert acceptance(ours) == acceptance(stats)
    else:
        found = evaluate_trees(offline, DraftModel(network), num_nodes)
        ours = found.acceptance.groups["all"][-1]
        assert ours.num_drafts == stats.num_drafts
        assert ours.num_accepted_tokens == stats.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_sampled_acceptance_is_expected_as_the_engine_finds_it(
    method: str, verification: Verification, tmp_path: Path
) -> None:
    network = random_head(method)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=40, ignore_eos=True)
    requests, stats = run_engine(network, K, params, verification, copies=2)
    dataset = write_answers(tmp_path, requests, 40)
    rule = SampledAcceptance(target().lm_head.weight, params)
    result = evaluate_sampled(evaluator(dataset), DraftModel(network), rule)[verification]
    ours = result.groups["all"][K - 1]
    # About 900 steps, so the mean has a standard error near 0.02.
    assert ours.mean_acceptance_length == pytest.approx(stats.mean_acceptance_length, abs=0.08)
    assert ours.conditional_acceptance[0] == pytest.approx(
        stats.conditional_acceptance[0], abs=0.05
    )
    assert ours.mean_acceptance_length > 1.1
