"""The scripts of benchmarks/ and recipes/ run, with tiny models and sizes.

Not here: what needs a GPU's own profiler (`step_breakdown`), minutes of an
interpreter (`batch_invariance`), vLLM (`engine_vs_vllm_cpu`) or processes of its own (`start_up`,
`server_cost`, `server_load`).
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from peagle.engine.memory import target_memory
from tests.tiny import engines, training
from tests.tiny.folders import write_head, write_model
from tests.tiny.jobs import prompts
from tests.tiny.models import SHALLOW, VOCAB, head_drafter

from .test_docs import script

pytestmark = pytest.mark.slow


class Scripts:
    """Runs scripts in this process; each writes a JSON document."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.folder = patch, folder
        self.model = write_model(folder / "model", max_position_embeddings=1024)
        self.head = write_head(folder / "head", self.model)
        self.prompts = folder / "prompts.jsonl"
        rows = [{"id": f"p{n}", "prompt": f"say {n}", "category": "code"} for n in range(8)]
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(self, path: str, **constants: Any) -> ModuleType:
        module = script(path, self.patch)
        for name, value in constants.items():
            self.patch.setattr(module, name, value)
        return module

    def run(self, module: ModuleType, *arguments: object) -> Any:
        out = self.folder / "out.json"
        words = [str(word) for word in (module.__name__, *arguments, "--out", out)]
        self.patch.setattr(sys, "argv", words)
        module.main()
        return json.loads(out.read_text(encoding="utf-8"))


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return Scripts(tmp_path, monkeypatch)


def test_engine_gpu_gives_the_same_answers_in_every_cell(scripts: Scripts) -> None:
    found = scripts.run(
        scripts.load("benchmarks/engine_gpu.py"),
        *("--device", "cpu", "--model", scripts.model, "--head", scripts.head),
        *("--prompts", scripts.prompts, "--depths", 2, "--concurrency", 1, 2),
        *("--max-tokens", 4, "--max-model-len", 128, "--rounds", 1, "--waves", 1, "--least", 2),
    )
    assert [(c["method"], c["concurrency"]) for c in found["cells"]] == [
        *(("none", 1), ("none", 2), ("p-eagle", 1), ("p-eagle", 2)),
    ]
    assert all(cell["same_answers"] == 1 for cell in found["cells"])


def test_lossless_gpu_finds_no_difference(scripts: Scripts) -> None:
    module = scripts.load("benchmarks/lossless_gpu.py")
    with pytest.raises(SystemExit) as ended:
        scripts.run(
            module,
            *("--device", "cpu", "--model", scripts.model, "--p-eagle", scripts.head),
            *("--methods", "none,p-eagle", "--prompts", scripts.prompts, "--limit", 2),
            *("--depths", 2, "--concurrency", "1,2", "--max-tokens", 4, "--max-model-len", 128),
        )
    assert ended.value.code == 0


def test_long_sequences_are_measured_by_segments_and_whole(scripts: Scripts) -> None:
    found = scripts.run(
        scripts.load("benchmarks/long_sequences.py"),
        *("--tokens", 64, "--depths", 3, "--hidden", 64, "--heads", 8, "--vocab", 64),
        *("--chunk-rows", 32, "--row-multiple", 16, "--segments", 1, 2, "--repeats", 1),
    )
    assert [entry["S"] for entry in found["table"]] == [1, 2, "plain"]


def test_engine_cpu_compares_four_ways(scripts: Scripts) -> None:
    sizes = {"NUM_TOKENS": 4, "NUM_DRAFTS": 2, "BATCH_SIZE": 2, "MEMORY_TOKENS": 4}
    module = scripts.load("benchmarks/engine_cpu.py", MODEL=str(scripts.model), **sizes)
    scripts.patch.setattr(module, "peak_memory_gib", module.memory_job)  # in this process
    found = scripts.run(module, "--repeats", 1)
    assert set(found["same_tokens_as_plain"].values()) == {True}
    assert found["peak_memory_gib"] > 0


def test_host_work_counts_updates(scripts: Scripts) -> None:
    names = {"MODEL": str(scripts.model), "HEAD": str(scripts.head)}
    chain = {"num_speculative_tokens": 2}
    tree = chain | {"num_draft_nodes": 3}
    drafts = {"plain": None, "chain": chain, "tree": tree, "auto": tree | {"speculation": "auto"}}
    module = scripts.load("benchmarks/host_work.py", **names, SETTINGS=drafts, MEMORY=1 << 20)
    found = scripts.run(module, "--streams", 1, 2, "--max-tokens", 4)
    assert [cell["setting"] for cell in found["cells"]] == [*drafts] * 2
    assert all(cell["updates"] > 0 for cell in found["cells"])


def test_varied_prompts_keep_their_ids_and_texts(scripts: Scripts, tmp_path: Path) -> None:
    module = scripts.load("recipes/vary_prompts.py")
    out = tmp_path / "varied.jsonl.gz"
    scripts.patch.setattr(sys, "argv", ["vary_prompts.py", str(scripts.prompts), str(out)])
    module.main()
    rows = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert sorted(row["id"] for row in rows) == [f"p{n}" for n in range(8)]
    for row in rows:
        assert f"say {row['id'][1:]}" in row["turns"][0]
        assert len(row["turns"][0]) > len("say 1")


def test_shapes_have_their_published_sizes_and_keep_low_bit_experts(scripts: Scripts) -> None:
    benchmark = scripts.load("benchmarks/step_costs.py")
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


def test_steps_of_targets_with_experts_are_timed_plain_in_chains_and_in_trees(
    scripts: Scripts,
) -> None:
    flags = "--device cpu --depths 2 --nodes 3 --tree-depth 2 --concurrency 1 4 --context 16"
    flags += " --shape gpt-oss-20b"
    found = scripts.run(scripts.load("benchmarks/step_costs.py"), *flags.split(), "--tiny")
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


def test_training_is_timed_with_the_target_in_the_process(scripts: Scripts) -> None:
    flags = "--with-target qwen3-30b-a3b --tokens 32 48 --segments 1 2 --repeats 1"
    flags += " --chunk-rows 32 --row-multiple 16"
    found = scripts.run(scripts.load("benchmarks/long_sequences.py"), *flags.split(), "--tiny")
    assert [(row["tokens"], row["S"]) for row in found["table"]] == [
        *((32, 1), (32, 2), (48, 1), (48, 2))
    ]
    for row in found["table"]:
        speed = row["tokens"] / row["seconds_per_step"]
        assert row["tokens_per_second"] == pytest.approx(speed)
    assert found["target_gib"] > 0


def test_a_window_counts_where_contexts_are_longer(scripts: Scripts) -> None:
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(VOCAB, (60,), generator=generator) for _ in range(30)]
    training.write_dataset(scripts.folder / "data", documents)
    module = scripts.load("benchmarks/sliding_windows.py")
    flags = f"--model {scripts.model} --heads {scripts.head} --windows 0 1000 8 --spec-tokens 3"
    found = scripts.run(module, *flags.split(), "--data", scripts.folder / "data")
    assert [cell["sliding_window"] for cell in found["cells"]] == [None, 1000, 8]
    none, wide, narrow = (cell["by_context"]["all"]["<512"] for cell in found["cells"])
    assert none["tokens"] == sum(len(tokens) - 3 - 1 for tokens in documents)
    assert none == wide != narrow


def test_gains_of_trees_compare_drafts_over_the_same_answers(scripts: Scripts) -> None:
    temperatures = scripts.load("benchmarks/temperatures.py", RESAMPLES=80)
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
