"""Records of a run -> its figures."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from statistics import fmean

from peagle.bench.results.document import Category, CellRun, Latencies, Quantiles
from peagle.bench.results.intervals import percentile
from peagle.bench.run.client import Record
from peagle.bench.run.driver import Outcome
from peagle.bench.run.meters import Meters
from peagle.speculation.looping import is_looping
from peagle.speculation.statistics import SpecDecodeStats

MOST_ERRORS = 20  # that a result names


def measure(
    outcome: Outcome,
    meters: Meters | None = None,
    server: SpecDecodeStats | None = None,
    *,
    concurrency: int | None = None,
    num_compiled: int = 0,
) -> CellRun:
    """`server`: acceptance as the backend's own counters have it, where answers carry none.
    `concurrency`: of a closed loop."""
    answered = [r for r in outcome.records if r.answer is not None and r.answer.error is None]
    num_tokens = sum(_num_tokens(record) for record in answered)
    wall = _wall(outcome.records)
    shown = [r for r in answered if r.answer is not None and r.answer.token_ids is not None]
    steady = [record for record in shown if not _loops(record)]
    stats = server if server is not None else merged(answered)
    return CellRun(
        otps=num_tokens / wall if wall > 0 else 0.0,
        latencies=latencies(answered),
        num_requests=len(answered),
        num_output_tokens=num_tokens,
        wall_s=wall,
        steady_otps=None if concurrency is None else steady_otps(outcome.records, concurrency),
        num_repeated=sum(r.call.task.is_repeat for r in outcome.records if not r.call.turn),
        num_compiled=num_compiled,
        stats=stats.as_dict() if stats is not None else {},
        looping_share=1 - len(steady) / len(shown) if shown else None,
        acceptance_without_looping=_length(merged(steady)),
        peak_memory_bytes=meters.peak_memory_bytes if meters else None,
        gpu_utilization=meters.gpu_utilization if meters else None,
        other_cpu_share=meters.other_cpu_share if meters else None,
        categories=_categories(answered),
        partial=_is_partial(outcome),
        errors=_errors(outcome),
    )


def steady_otps(records: Sequence[Record], concurrency: int) -> float | None:
    """While all streams are busy: until the last conversation began, since the first to end after
    that leaves its stream idle."""
    starts = [record.begun for record in records if not record.call.turn]
    if len(starts) <= concurrency or max(starts) <= min(starts):
        return None
    begun, ended = min(starts), max(starts)
    seen = [(record, bisect_right(record.times, ended)) for record in records]
    return sum(r.counts[n - 1] for r, n in seen if n) / (ended - begun)


def latencies(records: Sequence[Record]) -> Latencies:
    shown = [record for record in records if record.times]
    pairs = ((r.times[n], r.times[n + 1]) for r in shown for n in range(len(r.times) - 1))
    return Latencies(
        ttft=quantiles(r.times[0] - r.begun for r in shown),
        tpot=quantiles(
            (r.times[-1] - r.times[0]) / (_num_tokens(r) - 1) for r in shown if _num_tokens(r) > 1
        ),
        itl=quantiles(late - early for early, late in pairs),
        e2el=quantiles(r.times[-1] - r.begun for r in shown),
    )


def quantiles(values: Iterable[float]) -> Quantiles | None:
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p95, p99 = (percentile(ordered, share) for share in (0.50, 0.95, 0.99))
    return Quantiles(p50, p95, p99, fmean(ordered))


def merged(records: Iterable[Record]) -> SpecDecodeStats | None:
    """None where no answer carries any."""
    total = None
    for record in records:
        if record.answer is not None and record.answer.stats is not None:
            total = total or SpecDecodeStats()
            total.merge(record.answer.stats)
    return total


def _wall(records: Sequence[Record]) -> float:
    """Seconds from the first start or scheduled arrival to the last token, cut answers included."""
    ends = [record.times[-1] for record in records if record.times]
    return max(ends) - min(record.begun for record in records) if ends else 0.0


def _num_tokens(record: Record) -> int:
    return record.answer.num_tokens if record.answer is not None else 0


def _loops(record: Record) -> bool:
    assert record.answer is not None
    return is_looping(record.answer.token_ids or [])


def _length(stats: SpecDecodeStats | None) -> float | None:
    return stats.mean_acceptance_length if stats is not None and stats.num_drafts else None


def _categories(records: Sequence[Record]) -> dict[str, Category]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.call.task.category:
            groups.setdefault(record.call.task.category, []).append(record)
    return {
        name: Category(len(group), sum(map(_num_tokens, group)), _length(merged(group)))
        for name, group in groups.items()
    }


def _is_partial(outcome: Outcome) -> bool:
    """A prompt that the backend refuses is an error of the prompt, not a run cut short."""
    failed = [r for r in outcome.records if r.answer is None or r.answer.error is not None]
    return outcome.failure is not None or any(not record.refused for record in failed)


def _errors(outcome: Outcome) -> list[str]:
    errors = [
        f"{r.call.task.id}, turn {r.call.turn + 1}: {r.answer.error}"
        for r in outcome.records
        if r.answer is not None and r.answer.error is not None
    ]
    if len(errors) > MOST_ERRORS:
        errors = [*errors[:MOST_ERRORS], f"... and {len(errors) - MOST_ERRORS} more"]
    if outcome.failure is not None:
        errors.append(str(outcome.failure) or "interrupted")
    return errors
