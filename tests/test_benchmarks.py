"""Scripts of `benchmarks/`: those for a GPU rehearsed without one, and what their figures mean."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.engine.memory import target_memory
from tests.test_docs import script
from tests.tiny import engines
from tests.tiny.jobs import prompts
from tests.tiny.models import SHALLOW, head_drafter


def rehearse(
    name: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str
) -> dict[str, Any]:
    benchmark, out = script(f"benchmarks/{name}.py", monkeypatch), folder / "out.json"
    monkeypatch.setattr(sys, "argv", [name, *flags, "--tiny", "--out", str(out)])
    benchmark.main()
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def test_shapes_have_their_published_sizes_and_keep_low_bit_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    benchmark = script("benchmarks/step_costs.py", monkeypatch)
    kinds, sizes = {}, {}
    for name, shape in benchmark.SHAPES.items():
        target = benchmark.random_target(torch.device("cpu"), shape, tiny=True)
        experts = target.config.experts
        kinds[name] = experts.low_bit.kind if experts and experts.low_bit else None
        sizes[name] = target_memory(benchmark.decoder(shape)).num_parameters
    low_bit = {"gpt-oss-20b": "mxfp4", "qwen3-30b-a3b-fp8": "fp8"}
    assert kinds == {name: low_bit.get(name) for name in benchmark.SHAPES}
    billions = {"qwen3-8b": 8.2, "gpt-oss-20b": 20.9, "qwen3-30b-a3b": 30.5}
    assert {name: round(sizes[name] / 1e9, 1) for name in billions} == billions


@pytest.mark.slow
def test_steps_of_targets_with_experts_are_timed_plain_in_chains_and_in_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--device cpu --depths 2 --nodes 3 --tree-depth 2 --concurrency 1 4 --context 16"
    flags += " --shape gpt-oss-20b"
    found = rehearse("step_costs", monkeypatch, tmp_path, *flags.split())
    cells = {(row["method"], row.get("nodes"), row["concurrency"]): row for row in found["steps"]}
    methods = [("none", None), ("p-eagle", None), ("eagle3", None), ("p-eagle", 3)]
    assert set(cells) == {(*method, batch) for method in methods for batch in (1, 4)}
    for (_, _, batch), row in cells.items():
        plain = cells["none", None, batch]["step_ms"]
        assert row["pays_off_from"] == pytest.approx(row["step_ms"] / plain)
    # Two experts for one row, and more for more rows.
    assert cells["none", None, 1]["experts_read"] == 2
    assert cells["p-eagle", 3, 4]["experts_read"] > 4
    assert {part["part"] for part in found["step_costs"]} == {"plain", "verify", "draft", "other"}


@pytest.mark.slow
def test_training_is_timed_with_the_target_in_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--with-target qwen3-30b-a3b --tokens 32 48 --segments 1 2 --repeats 1"
    flags += " --chunk-rows 32 --row-multiple 16"
    found = rehearse("long_sequences", monkeypatch, tmp_path, *flags.split())
    assert [(row["tokens"], row["S"]) for row in found["table"]] == [
        *((32, 1), (32, 2), (48, 1), (48, 2))
    ]
    for row in found["table"]:
        speed = row["tokens"] / row["seconds_per_step"]
        assert row["tokens_per_second"] == pytest.approx(speed)
    assert found["target_gib"] > 0


@pytest.mark.slow
def test_gains_of_trees_compare_drafts_over_the_same_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temperatures = script("benchmarks/temperatures.py", monkeypatch)
    monkeypatch.setattr(temperatures, "RESAMPLES", 80)
    target = SHALLOW.make_target()
    drafter, texts = head_drafter(SHALLOW.make_head(target)), prompts(5)
    chains = engines.make_engine(target, drafter, k=3)
    trees = engines.make_engine(target, drafter, k=3, nodes=20)
    for temperature in (0.0, 1.0):
        chain = temperatures.answer(chains, texts, temperatures.Drafts(3), temperature, 12)
        tree = temperatures.answer(trees, texts, temperatures.Drafts(3, 20), temperature, 12)
        record = tree.record(chain)
        assert (record["K"], record["N"], record["different_answers"]) == (3, 20, 0)
        assert record["num_output_tokens"] == sum(map(len, tree.tokens)) == 5 * 12
        found = temperatures.gain(tree, chain)
        lengths = [run.record(chain)["mean_acceptance_length"] for run in (tree, chain)]
        assert found["gain"] == pytest.approx(lengths[0] / lengths[1], abs=1e-3)
        assert (found["tree"], found["chain"]) == ("N=20", "K=3")
        assert 1 <= found["low"] <= found["gain"] <= found["high"]
        assert found["gain"] > 1.05
