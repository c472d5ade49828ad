"""Computed step times against the published measurements: the errors that docs state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from peagle.bench.simulate.roofline import DecoderShape, RooflineCosts, drafter_shape, find_gpu

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
QWEN3_8B = DecoderShape(
    hidden_size=4096, intermediate_size=12288, num_layers=36,
    num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=151_936,
)  # fmt: skip
SMOLLM2_135M = DecoderShape(
    hidden_size=576, intermediate_size=1536, num_layers=30,
    num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49_152,
)  # fmt: skip


def measured(name: str) -> list[dict[str, Any]]:
    document = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return [step for step in document["steps"] if not step.get("does_not_fit")]


def errors(target: DecoderShape, steps: Sequence[dict[str, Any]]) -> list[float]:
    """Of whole steps, as shares of what was measured; below 0: computed too fast."""
    drafters = {method: drafter_shape(method, target) for method in ("p-eagle", "eagle3")}
    costs = RooflineCosts(find_gpu("h200", "bfloat16"), target, drafters)
    found = []
    for step in steps:
        place = step["concurrency"], step["context"]
        if step["method"] == "none":
            seconds = costs.plain(*place)
        else:
            seconds = costs.speculative(step["method"], step["K"], *place)
        seen = step["step_ms"] / 1e3 if "step_ms" in step else step["step_us"] / 1e6
        found.append(seconds / seen - 1)
    return found


def test_steps_of_an_8b_class_target_are_computed_as_well_as_the_docs_say() -> None:
    found = errors(QWEN3_8B, measured("step_costs_8b_h200.json"))
    assert len(found) == 63
    assert median(map(abs, found)) < 0.04
    assert max(map(abs, found)) < 0.16


@pytest.mark.parametrize(
    ("concurrency", "lowest", "highest"), [(1, 0.22, 0.34), (8, 0.05, 0.28), (32, -0.25, 0.15)]
)
def test_steps_of_a_small_target_are_off_by_what_the_docs_say(
    concurrency: int, lowest: float, highest: float
) -> None:
    """These were not used to choose the assumptions."""
    steps = [s for s in measured("step_breakdown_h200.json") if s["concurrency"] == concurrency]
    found = errors(SMOLLM2_135M, steps)
    assert len(found) == 3
    assert all(lowest < error < highest for error in found)


def test_break_even_lengths_follow_the_measured_ones() -> None:
    """What a user decides by: the step with drafts over the plain step."""
    steps = measured("step_costs_8b_h200.json")
    computed = dict(zip(map(_key, steps), errors(QWEN3_8B, steps), strict=True))
    wrong = [
        (1 + error) / (1 + computed["none", 0, *key[2:]]) - 1
        for key, error in computed.items()
        if key[0] != "none"
    ]
    assert len(wrong) == 56
    assert median(map(abs, wrong)) < 0.05
    assert max(map(abs, wrong)) < 0.2


def _key(step: dict[str, Any]) -> tuple[Any, ...]:
    return step["method"], step["K"], step["concurrency"], step["context"]
