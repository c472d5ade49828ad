"""One piece of advice: what is fastest, what cannot be told apart from it, and what to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peagle.bench.intervals import Interval
from peagle.bench.ratios import Speeds, is_above, scatter_of
from peagle.bench.settings import NONE, Setting

ALL = "all"


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
    tied: tuple[Choice, ...]  # cannot be told apart from the fastest with these repeats
    why: str

    @property
    def off(self) -> bool:
        return self.best.setting.method == NONE

    @property
    def plain(self) -> Choice:
        return next(c for c in self.choices if c.setting.method == NONE)


def decide(
    workload: str, load: str, choices: Sequence[Choice], speeds: Mapping[Setting, Speeds]
) -> Advice:
    """`choices`: fastest first."""
    fastest, scatter = choices[0], scatter_of(speeds.values())
    tied = tuple(
        c
        for c in choices[1:]
        if not is_above(scatter.ratio(speeds[fastest.setting], speeds[c.setting]), 1.0)
    )
    plain = next(c for c in choices if c.setting.method == NONE)
    best = fastest if _gains(fastest.gain) else plain
    why = _why(fastest, best) if len(choices) > 1 else "no drafter was measured"
    return Advice(workload, load, tuple(choices), best, tied, why)


def _gains(gain: Interval) -> bool:
    """Surely, or as far as a single repeat tells; none's own gain is 1."""
    return gain.mean > 1.0 if gain.low is None else is_above(gain, 1.0)


def _why(fastest: Choice, best: Choice) -> str:
    if best.setting == fastest.setting and best.setting.method == NONE:
        return "nothing measured is faster than no speculation"
    if best.setting.method == NONE:
        return f"the best, {fastest.name}, gains {in_words(fastest.gain)}: no sure gain"
    return f"gains {in_words(best.gain)}"


def in_words(gain: Interval) -> str:
    """`1.52x (1.48 to 1.56)`; a single repeat has no bounds and says so."""
    if gain.low is None or gain.high is None:
        return f"{gain.mean:.2f}x (one repeat, no interval)"
    return f"{gain.mean:.2f}x ({gain.low:.2f} to {gain.high:.2f})"
