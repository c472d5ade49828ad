"""Which method and K to run, from bench results: per load, per workload, and over all.

One piece of advice says what is fastest, what cannot be told apart from it, and what to run; then
what its tokens cost, and the flags that start it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.bench.analysis.gains import (
    Speeds,
    gains,
    is_above,
    mean_tokens,
    mixed_speeds,
    scatter_of,
)
from peagle.bench.results.document import Cell, Results
from peagle.bench.results.figures import counted, factor_with_bounds
from peagle.bench.results.intervals import Interval, median_interval
from peagle.bench.results.settings import (
    NONE,
    Names,
    Place,
    Setting,
    by_place,
    load_key,
    place_of,
    series_names,
    short_name,
    usable_runs,
)
from peagle.config import SpeculativeConfig
from peagle.errors import DataError

ALL = "all"
Cells = Mapping[Setting, Cell]
SECONDS_PER_HOUR = 3600
MOST_NAMED = 4  # settings that are as good as the one that is advised


@dataclass(frozen=True)
class Choice:
    """One setting's speed, and its gain over none, from the repeats that ran beside each other."""

    setting: Setting
    name: str
    otps: Interval
    gain: Interval  # ratio; 1 for none itself
    acceptance_length: float | None = None


@dataclass(frozen=True)
class Advice:
    """What to run for one workload (or all) under one load (or all)."""

    workload: str
    load: str
    choices: tuple[Choice, ...]  # fastest first; none is among them
    best: Choice  # what is advised; none where speculation should be off
    # Others that cannot be told apart from the fastest, or are it; none where noise is not known.
    tied: tuple[Choice, ...]
    why: str

    @property
    def off(self) -> bool:
        return self.best.setting.method == NONE

    @property
    def tied_names(self) -> str:
        """`p-eagle K=5, eagle3 K=7 and 3 more`; empty without any."""
        if len(self.choices) > 1 and self.choices[0].gain.low is None:
            return "not known"
        names = [choice.name for choice in self.tied]
        more = len(names) - MOST_NAMED
        return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")

    @property
    def plain(self) -> Choice:
        return next(c for c in self.choices if c.setting.method == NONE)


def decide(
    workload: str, load: str, choices: Sequence[Choice], speeds: Mapping[Setting, Speeds]
) -> Advice:
    """`choices`: fastest first."""
    fastest, scatter = choices[0], scatter_of(speeds.values())
    plain = next(c for c in choices if c.setting.method == NONE)
    best = fastest if _gains(fastest.gain) else plain
    tied = tuple(
        c
        for c in choices
        if c is not best and _holds_one(scatter.ratio(speeds[fastest.setting], speeds[c.setting]))
    )
    why = _why(fastest, best) if len(choices) > 1 else "no drafter was measured"
    return Advice(workload, load, tuple(choices), best, tied, why)


def _holds_one(ratio: Interval) -> bool:
    return ratio.low is not None and not is_above(ratio, 1.0)


def _gains(gain: Interval) -> bool:
    """Whether it is a sure gain, or one as far as too few repeats tell; none's own is 1."""
    return gain.value > 1.0 if gain.low is None else is_above(gain, 1.0)


def _why(fastest: Choice, best: Choice) -> str:
    if best.setting == fastest.setting and best.setting.method == NONE:
        return "nothing measured is faster than no speculation"
    if best.setting.method == NONE:
        gain = factor_with_bounds(fastest.gain)
        return f"the fastest, {fastest.name}, gains {gain}, which may be noise"
    return f"gains {factor_with_bounds(best.gain)}"


@dataclass(frozen=True)
class Tuning:
    by_place: tuple[Advice, ...]  # each workload under each load
    by_load: tuple[Advice, ...]  # all workloads under each load, weighted by tokens
    overall: Advice  # one setting for everything
    notes: tuple[str, ...]


def tune(results: Results) -> Tuning:
    """Advice for every place, every load over all workloads, and overall."""
    table = {p: c for p, c in by_place(results.cells).items() if _plain(c) and not p.is_open_loop}
    if not any(usable_runs(cell) for cell in results.cells):
        raise DataError("nothing was measured yet", hint="run peagle bench again to go on")
    if not table:
        raise DataError(
            "method none was not measured at a concurrency, so there is nothing to gain over",
            hint="measure the same workloads without a drafter, too, and by --concurrency",
        )
    loads = sorted({place.load for place in table}, key=load_key)
    names = series_names(results.cells)
    overall = _advise(table, ALL, ALL, names)
    return Tuning(
        by_place=tuple(_advise({p: c}, p.workload, p.load, names) for p, c in table.items()),
        by_load=tuple(_advise(_at(table, load), ALL, load, names) for load in loads),
        overall=overall,
        notes=_notes(results, table, overall),
    )


def _at(table: Mapping[Place, Cells], load: str) -> dict[Place, Cells]:
    return {place: cells for place, cells in table.items() if place.load == load}


def _plain(cells: Cells) -> Cell | None:
    return next((cell for setting, cell in cells.items() if setting.method == NONE), None)


def _advise(table: Mapping[Place, Cells], workload: str, load: str, names: Names) -> Advice:
    """Settings that were measured everywhere in `table` compete."""
    everywhere = set.intersection(*(set(cells) for cells in table.values()))
    settings = sorted(everywhere, key=lambda s: s.sort_key)
    weights = [mean_tokens(_found(_plain(cells))) for cells in table.values()]
    speeds = {s: mixed_speeds([cells[s] for cells in table.values()], weights) for s in settings}
    gained = gains(speeds)
    lengths = {s: _acceptance([cells[s] for cells in table.values()], weights) for s in settings}
    choices = sorted(
        (
            Choice(s, short_name(s, names), median_interval([*v.values()]), gained[s], lengths[s])
            for s, v in speeds.items()
        ),
        key=lambda c: -c.gain.value,
    )
    return decide(workload, load, choices, speeds)


def _acceptance(cells: Sequence[Cell], weights: Sequence[float]) -> float | None:
    """Tokens per step over all cells: tokens add up, and so do steps."""
    summaries = [cell.summary() for cell in cells]
    lengths = [s.acceptance_length if s else None for s in summaries]
    steps = [w / n for w, n in zip(weights, lengths, strict=True) if n]
    return sum(weights) / sum(steps) if len(steps) == len(cells) else None


def _found(cell: Cell | None) -> Cell:
    assert cell is not None
    return cell


def _notes(results: Results, table: Mapping[Place, Any], overall: Advice) -> tuple[str, ...]:
    notes = []
    closed = {place_of(c) for c in results.cells if not place_of(c).is_open_loop}
    missing = sorted(f"{place.workload} at {place.load}" for place in closed - set(table))
    if missing:
        notes.append(f"left out, method none was not measured there: {', '.join(missing)}")
    if any(place_of(cell).is_open_loop for cell in results.cells):
        notes.append("request rates are left out: arrivals set their speed, see their latencies")
    if results.partial or any(run.partial for cell in results.cells for run in cell.repeats):
        notes.append("the results are partial: measure the rest before you rely on this")
    if len(overall.choices) > 1 and overall.choices[0].gain.low is None:
        repeats = counted(min(c.gain.num_values for c in overall.choices), "repeat")
        notes.append(f"{repeats} only: no intervals, nothing says which gains are noise")
    return tuple(notes)


@dataclass(frozen=True)
class Cost:
    """The cost of one replica: `num_gpus` GPUs that answer at `otps`."""

    otps: float
    tokens_per_dollar: float | None = None
    dollars_per_million_tokens: float | None = None
    gpus_for_wanted_rate: int | None = None


def cost_of(
    otps: float,
    *,
    num_gpus: int = 1,
    gpu_dollars_per_hour: float | None = None,
    wanted_otps: float | None = None,
) -> Cost:
    per_dollar = None
    if gpu_dollars_per_hour:
        per_dollar = otps * SECONDS_PER_HOUR / (gpu_dollars_per_hour * num_gpus)
    # The small slack keeps 3 x 100 tokens/s from asking for a fourth GPU by rounding.
    replicas = math.ceil(wanted_otps / otps - 1e-9) if wanted_otps else None
    return Cost(
        otps=otps,
        tokens_per_dollar=per_dollar,
        dollars_per_million_tokens=1e6 / per_dollar if per_dollar else None,
        gpus_for_wanted_rate=max(1, replicas) * num_gpus if replicas is not None else None,
    )


def peagle_config(setting: Setting) -> dict[str, Any] | None:
    """The value of `--speculative-config` for peagle's verbs; None: no speculation."""
    if setting.method == NONE:
        return None
    config = {
        "method": setting.method,
        "model": setting.head,
        "num_speculative_tokens": None if setting.is_auto else setting.num_speculative_tokens,
        "num_draft_nodes": setting.num_draft_nodes,
        "speculation": "auto" if setting.is_auto else None,
    }
    return {key: value for key, value in config.items() if value is not None}


def vllm_config(setting: Setting) -> dict[str, Any] | None:
    """The value of `vllm serve --speculative-config`: both kinds of head are eagle3 there. None for
    trees, which vLLM does not draft, and where the engine chooses."""
    if setting.num_draft_nodes is not None or setting.is_auto:
        return None
    config = peagle_config(setting)
    if config is None or setting.method not in ("p-eagle", "eagle3", "ngram"):
        return config
    if setting.method == "ngram":
        defaults = SpeculativeConfig(method="ngram")
        return config | {
            "prompt_lookup_max": defaults.prompt_lookup_max,
            "prompt_lookup_min": defaults.prompt_lookup_min,
        }
    parallel = {"parallel_drafting": True} if setting.method == "p-eagle" else {}
    return config | {"method": "eagle3"} | parallel
