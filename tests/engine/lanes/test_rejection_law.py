"""By rejection, what lanes say has the target's law; captured steps: tests/engine/gpu."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from peagle.engine.lanes.engine import LaneEngine

from peagle.config import EngineConfig
from peagle.engine.engine import Speculation
from peagle.engine.kv_cache import slot_bytes
from peagle.engine.runner import target_layout
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams

from .. import tiny
from ..test_sampled_law import SMALL_VOCAB, deviation, exact_law

PROMPT, LENGTH = [1, 2, 0, 3, 1, 2, 0], 3
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "p-eagle": ({}, {}),
    "p-eagle, reduced vocabulary": ({"draft_vocab_size": 3}, {"temperature": 1.3}),
    "eagle3, filtered": ({"method": "eagle3"}, {"temperature": 0.8, "top_k": 3}),
}


def models(head: dict[str, Any]) -> tuple[TargetModel, Drafter]:
    target = tiny.make_target(torch.float32, vocab_size=SMALL_VOCAB)
    return target, tiny.head_drafter(tiny.make_head(target, **head))


def lanes(target: TargetModel, drafter: Drafter, k: int, **options: Any) -> LaneEngine:
    """As the engine is built, without anything that watches it."""
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


@pytest.mark.parametrize("name", CASES)
def test_answers_have_the_targets_law_beside_greedy_ones(name: str) -> None:
    head, mode = CASES[name]
    target, drafter = models(head)
    # One token more than is looked at, so that the last of them is drafted for, too.
    check_law(lanes(target, drafter, 2), SamplingParams(max_tokens=LENGTH + 1, **mode), 1000)


def test_preemption_leaves_the_law_alone() -> None:
    """What a step in flight would have said is lost, and drawn again."""
    target, drafter = models({})
    assert drafter.cache_layout is not None
    layouts = (target_layout(target), drafter.cache_layout)
    num_bytes = 150 * sum(slot_bytes(layout, torch.float32) for layout in layouts)
    options = {"kv_cache_memory_bytes": num_bytes, "max_model_len": 24, "block_size": 1}
    params = SamplingParams(max_tokens=LENGTH + 6)
    assert check_law(lanes(target, drafter, 2, **options), params, 300) > 50
