"""Made-up bench results with known answers, built through the schema's own constructors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from peagle.bench.results.document import (
    AnswerDifference,
    Cell,
    CellRun,
    Latencies,
    Lossless,
    Manifest,
    MeasuredHead,
    Quantiles,
    Results,
    Sample,
    SampleToken,
    TreeNode,
    TreeSample,
    WorkloadInfo,
)
from peagle.speculation.statistics import SpecDecodeStats

HEAD = "heads/smollm2-135m-p-eagle"
RATES = {"p-eagle": 0.75, "eagle3": 0.7, "ngram": 0.3}  # of each draft, if all before were kept
HEADS = {"p-eagle": HEAD, "eagle3": "heads/smollm2-135m-eagle3"}
PLAIN_STEP = 0.02  # seconds at one request
DRAFT_STEP = {"p-eagle": 0.004, "eagle3": 0.002, "ngram": 0.0}  # EAGLE-3's for each token


def make_run(
    otps: float,
    *,
    num_tokens: int = 1000,
    stats: dict[str, Any] | None = None,
    looping: float | None = None,
    partial: bool = False,
) -> CellRun:
    pace = max(otps, 1.0)
    tail = Quantiles(p50=1 / pace, p95=2 / pace, p99=3 / pace, mean=1.2 / pace)
    first = Quantiles(p50=0.05, p95=0.08, p99=0.12, mean=0.06)
    return CellRun(
        otps=otps,
        latencies=Latencies(ttft=first, tpot=tail, itl=tail, e2el=_scaled(tail, 100)),
        num_requests=10,
        num_output_tokens=num_tokens,
        wall_s=num_tokens / pace,
        stats=stats or {},
        looping_share=looping,
        acceptance_without_looping=2.5 if looping else None,
        partial=partial,
        errors=["the endpoint went away"] if partial else [],
    )


def make_cell(
    method: str = "none",
    k: int = 0,
    speeds: Sequence[float] = (100.0, 101.0, 99.0),
    *,
    workload: str = "chat",
    concurrency: int | None = 1,
    **run: Any,
) -> Cell:
    return Cell(
        method=method,
        num_speculative_tokens=k,
        workload=workload,
        concurrency=concurrency,
        head=HEADS.get(method),
        repeats=[make_run(speed, **run) for speed in speeds],
    )


def make_results(cells: Sequence[Cell], **changes: Any) -> Results:
    names = sorted({cell.workload for cell in cells})
    manifest = Manifest(
        provenance={
            "time": "2026-01-02T03:04:05+00:00",
            "command": ["peagle", "bench", "smollm2-135m"],
            "hardware": {"cpu": "A CPU", "cores": 2, "memory_gib": 23.5, "gpus": []},
            "versions": {"peagle": "0.1.0", "torch": "2.13.0"},
            "git": {"commit": "0123456789abcdef", "dirty": False},
        },
        model="smollm2-135m",
        backend="embedded",
        dtype="float32",
        device="cpu",
        seed=0,
        max_tokens=128,
        temperature=0.0,
        num_repeats=3,
        heads=[MeasuredHead(head, method, "ab" * 32) for method, head in HEADS.items()],
        workloads=[WorkloadInfo(name, name.encode().hex() * 4, 10) for name in names],
        settings={"ignore_eos": False},
    )
    return replace(Results(manifest=manifest, cells=list(cells)), **changes)


def modelled_cell(method: str, k: int, workload: str, load: int, repeats: int = 3) -> Cell:
    """A cell whose figures follow from step times and acceptance, with 1 % of scatter."""
    rate = RATES.get(method, 0.0) * (1.1 if workload == "code" else 1.0)
    length = 1 + sum(rate**n for n in range(1, k + 1))
    plain = PLAIN_STEP * (1 + 0.05 * load)
    verify = plain * (1 + 0.02 * k * load**0.7)
    draft = DRAFT_STEP.get(method, 0.0) * (k if method == "eagle3" else 1) * (1 + 0.05 * load)
    num_steps = round(1000 / length)
    parts = {"draft_time": draft, "verify_time": verify, "other_time": 0.001}
    runs = []
    for n in range(repeats):
        step = sum(parts.values()) * (1 + 0.01 * (n - 1))
        stats = SpecDecodeStats(num_output_tokens=1000, num_steps=num_steps)
        if k:
            stats = _counted(stats, rate, k, num_steps)
        times = {name: value / load * num_steps for name, value in parts.items()}
        runs.append(make_run(load * length / step, stats=stats.as_dict() | times, looping=0.2))
    return Cell(
        method=method, num_speculative_tokens=k, workload=workload, concurrency=load,
        head=HEADS.get(method), repeats=runs,
    )  # fmt: skip


def modelled_grid(
    workloads: Sequence[str] = ("chat", "code"),
    loads: Sequence[int] = (1, 4, 16),
    ks: Sequence[int] = (1, 3, 5, 7),
    methods: Sequence[str] = ("ngram", "eagle3", "p-eagle"),
    **changes: Any,
) -> Results:
    cells = [
        modelled_cell(method, k, workload, load)
        for workload in workloads
        for load in loads
        for method in ("none", *methods)
        for k in (ks if method != "none" else (0,))
    ]
    return make_results(cells, **changes)


def make_samples(texts: Sequence[str] = ("The", " sky", " is", " blue", ".")) -> list[Sample]:
    def sample(method: str, k: int) -> Sample:
        tokens = [SampleToken(text, k > 0 and n % 3 > 0) for n, text in enumerate(texts)]
        return Sample("chat", "q1", "Why is the sky blue?", method, k, tokens)

    return [sample("none", 0), sample("eagle3", 3), sample("p-eagle", 5)]


def make_tree(method: str = "p-eagle N=6", texts: Sequence[str] = (" sky", " sea")) -> TreeSample:
    """``sky`` and ``is`` behind it were taken, then the target wrote ``blue``."""
    nodes = [
        TreeNode(texts[0], 0, accepted=True),
        TreeNode(" was", 1, accepted=False),
        TreeNode(texts[1], 0, accepted=False),
        TreeNode(" is", 1, accepted=True),
        TreeNode(" red", 4, accepted=False),
        TreeNode(" is", 3, accepted=False),
    ]
    return TreeSample("chat", "q1", method, 7, "Why? The", nodes, " blue")


def make_lossless(different: int = 0, gap: float | None = 1e-4) -> Lossless:
    found = [
        AnswerDifference("p-eagle", 5, "chat", "4", 0, f"q{n}", 0, 17, 11, 12, gap, " a", " the")
        for n in range(different)
    ]
    return Lossless(compared=240, different=different, differences=found)


def _counted(stats: SpecDecodeStats, rate: float, k: int, steps: int) -> SpecDecodeStats:
    accepted = [round(steps * rate**n) for n in range(1, k + 1)]
    return replace(
        stats,
        num_drafts=steps,
        num_draft_tokens=k * steps,
        num_accepted_tokens=sum(accepted),
        num_draft_tokens_per_pos=[steps] * k,
        num_reached_tokens_per_pos=[steps, *accepted[:-1]],
        num_accepted_tokens_per_pos=accepted,
    )


def _scaled(tail: Quantiles, factor: float) -> Quantiles:
    return Quantiles(tail.p50 * factor, tail.p95 * factor, tail.p99 * factor, tail.mean * factor)
