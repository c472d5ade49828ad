"""The scripts of benchmarks/ and recipes/ run, with tiny models and sizes.

Not here: what needs a GPU's own clock or profiler (`step_costs`, `step_breakdown`), minutes of an
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

from tests.tiny.folders import write_head, write_model

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
    module = scripts.load("benchmarks/host_work.py", **names, DEPTHS=(0, 2), MEMORY=1 << 20)
    found = scripts.run(module, "--streams", 2, "--max-tokens", 4)
    assert [cell["K"] for cell in found["cells"]] == [0, 2]
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
