"""`peagle bench` on the real vLLM: a grid with a head, measured and compared as on our engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.cli.main import main
from tests.vllm.released_head import write_released_head, write_target

pytestmark = pytest.mark.vllm

SMALL = ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--repeats", "2")


def test_grid_of_vllm_measures_acceptance_and_finds_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_target(tmp_path / "target")
    head = write_released_head(tmp_path / "head", target)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{n}", "turns": [f"abc {n}", "and"]} for n in range(3)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drafters = ("--spec-model", str(head), "--spec-tokens", "3", "--backend", "vllm")
    work = ("--workload", str(prompts), "--max-tokens", "12", "--ignore-eos")
    work += ("--concurrency", "2", "--answers-per-stream", "1")
    out = ("--gpu-memory-utilization", "0.15", "--out", str(tmp_path / "out"), "--json")
    assert main(["bench", str(target), *SMALL, *drafters, *work, *out]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    plain, drafted = document["cells"]
    assert [len(cell["repeats"]) for cell in document["cells"]] == [2, 2]
    for run in (*plain["repeats"], *drafted["repeats"]):
        assert run["num_requests"] == 6
        assert run["num_output_tokens"] == 72
        assert run["latencies"]["ttft"]["p50"] > 0
    assert drafted["summary"]["acceptance_length"] > 1
    assert document["lossless"]["compared"] == 3 * 6
    assert document["lossless"]["different"] == 0
