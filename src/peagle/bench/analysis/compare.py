"""Two result files side by side: what became faster, slower, or stayed within the noise.

Results of other models or prompts are refused; other differences are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from peagle.bench.analysis.gains import is_above, is_below, unpaired_ratio
from peagle.bench.results.document import Cell, Manifest, Results
from peagle.bench.results.figures import counted
from peagle.bench.results.intervals import FEWEST_DEGREES, Interval
from peagle.bench.results.settings import (
    Place,
    Setting,
    by_place,
    distinct_names,
    full_name,
    usable_runs,
)
from peagle.errors import ConfigError

Verdict = Literal["faster", "slower", "same", "unknown"]  # unknown: too few repeats
Key = tuple[Place, Setting]
TOLERANCE = 0.02  # a loss below this share is not a regression, however sure it is


@dataclass(frozen=True)
class CellComparison:
    """One cell of both files; ratios are B over A."""

    place: Place
    setting: Setting
    a: Interval
    b: Interval
    ratio: Interval
    verdict: Verdict
    acceptance_a: float | None
    acceptance_b: float | None
    acceptance_ratio: Interval | None  # of acceptance lengths; None: nothing was drafted
    slower: bool  # beyond noise and tolerance
    fewer_accepted: bool

    @property
    def is_regression(self) -> bool:
        return self.slower or self.fewer_accepted


@dataclass(frozen=True)
class Comparison:
    cells: tuple[CellComparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    warnings: tuple[str, ...]  # why the two may not be comparable

    @property
    def regressions(self) -> tuple[CellComparison, ...]:
        return tuple(cell for cell in self.cells if cell.is_regression)

    @property
    def exit_code(self) -> int:
        return 1 if self.regressions else 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "num_regressions": len(self.regressions)}


def compare(
    a: Results, b: Results, *, tolerance: float = TOLERANCE, force: bool = False
) -> Comparison:
    """`a` is the old file, `b` the new. Different models or prompts are refused unless forced."""
    if not 0 <= tolerance < 1:
        raise ConfigError(f"a tolerance of {tolerance} is out of range", hint="use 0 to 1")
    warnings = unlike(a.manifest, b.manifest)
    if warnings and not force:
        raise ConfigError(
            f"the two results cannot be compared: {'; '.join(warnings)}",
            hint="measure both alike, or add --force",
        )
    cells_a, cells_b = _flat(a), _flat(b)
    shared = [key for key in cells_a if key in cells_b]
    if not shared:
        raise ConfigError(
            "the two results have no cell in common",
            hint="measure the same methods, K, workloads and loads",
        )
    greedy = a.manifest.temperature == b.manifest.temperature == 0
    return Comparison(
        cells=tuple(
            _compare(key, cells_a[key], cells_b[key], tolerance, greedy=greedy) for key in shared
        ),
        only_a=tuple(_name(key) for key in cells_a if key not in cells_b),
        only_b=tuple(_name(key) for key in cells_b if key not in cells_a),
        warnings=(*warnings, *remarks(a, b), *_limits(shared, cells_a, cells_b)),
    )


def _compare(key: Key, a: Cell, b: Cell, tolerance: float, *, greedy: bool) -> CellComparison:
    summary_a, summary_b = a.summary(), b.summary()
    assert summary_a is not None
    assert summary_b is not None
    ratio = unpaired_ratio(
        [run.otps for run in usable_runs(b)], [run.otps for run in usable_runs(a)]
    )
    lengths = _acceptance_ratio(a, b, greedy=greedy)
    return CellComparison(
        *key,
        a=summary_a.otps,
        b=summary_b.otps,
        ratio=ratio,
        verdict=_verdict(ratio),
        acceptance_a=summary_a.acceptance_length,
        acceptance_b=summary_b.acceptance_length,
        acceptance_ratio=lengths,
        slower=is_below(ratio, 1 - tolerance),
        fewer_accepted=lengths is not None and is_below(lengths, 1 - tolerance),
    )


def _verdict(ratio: Interval) -> Verdict:
    if ratio.low is None:
        return "unknown"
    if is_above(ratio, 1.0):
        return "faster"
    return "slower" if is_below(ratio, 1.0) else "same"


def _acceptance_ratio(a: Cell, b: Cell, *, greedy: bool) -> Interval | None:
    """Greedy answers are accepted alike in every repeat, so that one repeat is enough."""
    of_a = [n for run in usable_runs(a) if (n := run.acceptance_length) is not None]
    of_b = [n for run in usable_runs(b) if (n := run.acceptance_length) is not None]
    if not of_a or not of_b:
        return None
    ratio = unpaired_ratio(of_b, of_a)
    if ratio.low is None and greedy:
        return replace(ratio, low=ratio.value, high=ratio.value)
    return ratio


def _limits(shared: Sequence[Key], *tables: Mapping[Key, Cell]) -> Iterator[str]:
    """What this comparison cannot see."""
    fewest = min(len(usable_runs(table[key])) for key in shared for table in tables)
    if fewest <= FEWEST_DEGREES:
        repeats = counted(fewest, "repeat")
        yield f"{repeats} of a cell do not tell noise from change: its speed counts as unchanged"
    if any(place.is_open_loop for place, _ in shared):
        yield "request rates: arrivals set their speed, and latencies are not compared"


def _flat(results: Results) -> dict[Key, Cell]:
    """Heads by their last name, where it is theirs alone: a head may lie in another folder."""
    heads = sorted({cell.head for cell in results.cells if cell.head})
    names = dict(zip(heads, distinct_names(heads), strict=True))
    return {
        (place, _portable(setting, names)): cell
        for place, cells in by_place(results.cells).items()
        for setting, cell in cells.items()
    }


def _portable(setting: Setting, names: Mapping[str, str]) -> Setting:
    name = names[setting.head] if setting.head else None
    return replace(setting, head=name)


def _name(key: Key) -> str:
    place, setting = key
    return f"{full_name(setting)}, {place.workload} at {place.load}"


def unlike(a: Manifest, b: Manifest) -> list[str]:
    """Differences that make the figures speak of different things."""
    found = [
        f"{name} {old!r} and {new!r}"
        for name, old, new in (
            ("models", a.model, b.model),
            ("max_tokens", a.max_tokens, b.max_tokens),
            ("temperatures", a.temperature, b.temperature),
        )
        if old != new
    ]
    hashes_a = {w.name: w.sha256 for w in a.workloads}
    hashes_b = {w.name: w.sha256 for w in b.workloads}
    both = sorted(hashes_a.keys() & hashes_b.keys())
    found += [f"other prompts in {name}" for name in both if hashes_a[name] != hashes_b[name]]
    return found


def remarks(a: Results, b: Results) -> tuple[str, ...]:
    """Differences that may well be the point of the comparison, but must be seen."""
    remarks = [
        f"{name}: {old} and {new}"
        for name, old, new in (
            ("backends", a.manifest.backend, b.manifest.backend),
            ("dtypes", a.manifest.dtype, b.manifest.dtype),
            ("hardware", _machine(a.manifest), _machine(b.manifest)),
        )
        if old != new
    ]
    remarks += [f"{side} is partial" for side, r in (("A", a), ("B", b)) if r.partial]
    return tuple(remarks)


def _machine(manifest: Manifest) -> str:
    hardware: Mapping[str, Any] = manifest.provenance.get("hardware") or {}
    return ", ".join(hardware.get("gpus") or []) or str(hardware.get("cpu", "unknown"))
