"""README and docs say what the committed report of the H200 holds."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
REPORT = ROOT / "benchmarks" / "reports" / "smollm2_h200" / "results.json"
WORKLOADS = {"humaneval": "HumanEval", "mt-bench": "MT-Bench"}
METHODS = {"p-eagle": "P-EAGLE", "eagle3": "EAGLE-3"}


def speeds(workload: str, method: str) -> list[tuple[float, int]]:
    """Tokens per second of the best K, and that K, by concurrency."""
    cells: list[dict[str, Any]] = json.loads(REPORT.read_text(encoding="utf-8"))["cells"]
    best: dict[int, tuple[float, int]] = {}
    for cell in cells:
        if (cell["workload"], cell["method"]) == (workload, method):
            speed = mean(r["otps"] for r in cell["repeats"]), cell["num_speculative_tokens"]
            best[cell["concurrency"]] = max(best.get(cell["concurrency"], (0.0, 0)), speed)
    return [best[concurrency] for concurrency in sorted(best)]


def row(name: str, values: list[str]) -> str:
    return f"| {name} | {' | '.join(values)} |"


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("page", "names_k"), [("README.md", False), ("docs/performance.md", True)])
def test_speeds_on_a_gpu_are_those_of_the_report(page: str, names_k: bool, workload: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    plain = [speed for speed, _ in speeds(workload, "none")]
    turns = ", two turns" if names_k and workload == "mt-bench" else ""
    rows = [row(f"{WORKLOADS[workload]}{turns}, plain", [f"{speed:,.0f}" for speed in plain])]
    for method, name in METHODS.items():
        gains = zip(speeds(workload, method), plain, strict=True)
        k = ", K {}" if names_k else ""
        values = [f"{s:,.0f} ({s / p:.2f}x{k.format(depth)})" for (s, depth), p in gains]
        rows.append(row(name, values))
    assert "\n".join(rows) in text
