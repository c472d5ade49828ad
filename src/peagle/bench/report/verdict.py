"""What the figures mean, in plain words: speed, sameness of output, looping, what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peagle.bench.advice import Advice, in_words
from peagle.bench.intervals import Interval
from peagle.bench.results import Results
from peagle.bench.sameness import agreements, lossless_verdict
from peagle.bench.settings import usable_runs
from peagle.bench.timings import looping_share
from peagle.bench.tune import Tuning


@dataclass(frozen=True)
class KeyFigure:
    """One of the large figures at the top."""

    value: str
    what: str


def headline(tuning: Tuning | None) -> str:
    if tuning is None:
        return (
            "What speculation gains cannot be said: method none was not measured at a concurrency."
        )
    advice = tuning.overall
    if advice.off:
        return f"Speculation does not pay over all of this traffic: {advice.why}."
    gain, (low, high) = advice.best.gain, _bounds(advice.best.gain)
    sure = f"95 % interval {low} to {high}" if low else "one repeat, so no interval"
    return (
        f"{advice.best.name} answers {gain.mean:.2f} times as fast as no speculation "
        f"over all that was measured ({sure})."
    )


def key_figures(results: Results, tuning: Tuning | None) -> list[KeyFigure]:
    figures = []
    if tuning is not None and not tuning.overall.off:
        best = tuning.overall.best
        figures.append(KeyFigure(f"{best.gain.mean:.2f}x", f"speed with {best.name}"))
        if best.acceptance_length is not None:
            figures.append(
                KeyFigure(
                    f"{best.acceptance_length:.2f}",
                    "mean acceptance length: tokens a step with drafts",
                )
            )
    if tuning is not None:
        peak = max(tuning.by_load, key=lambda a: a.best.otps.mean)
        what = f"output tokens per second at most, {load_in_words(peak.load)}"
        figures.append(KeyFigure(f"{peak.best.otps.mean:,.0f}", what))
    if results.lossless is not None:
        _, found = agreements(results.lossless)
        if found is not None:
            what = f"of {found.compared} answers equal those without speculation"
            figures.append(KeyFigure(f"{found.compared - found.different}", what))
    return figures


def sentences(results: Results, tuning: Tuning | None) -> Iterator[str]:
    """What follows the headline, most important first."""
    if tuning is not None:
        yield from _speed(tuning)
    yield lossless_verdict(results.lossless, results.manifest.dtype)
    looping = looping_sentence(results)
    if looping:
        yield looping
    if tuning is not None:
        yield from (f"{note[0].upper()}{note[1:]}." for note in tuning.notes)


def load_in_words(load: str) -> str:
    if load.endswith("/s"):
        return f"at {load.removesuffix('/s')} requests per second"
    return "with 1 request at once" if load == "1" else f"with {load} requests at once"


def _speed(tuning: Tuning) -> Iterator[str]:
    gains = [a for a in tuning.by_load if not a.off]
    if len(tuning.by_load) > 1 and gains:
        most = max(gains, key=lambda a: a.best.gain.mean)
        yield (
            f"The gain is largest {load_in_words(most.load)}: {in_words(most.best.gain)} "
            f"with {most.best.name}."
        )
        if len(gains) > 1 and gains[-1] is not most:
            last = gains[-1]
            yield (
                f"{load_in_words(last.load).capitalize()} it is {in_words(last.best.gain)}, "
                f"best with {last.best.name}."
            )
    off = [a for a in tuning.by_load if a.off]
    if off:
        places = ", ".join(load_in_words(a.load) for a in off)
        yield f"Speculation should be off {places}: {off[0].why}."
    losing = [a for a in tuning.by_place if a.off and a.load not in {b.load for b in off}]
    if losing:
        yield f"It does not pay for {', '.join(_place(a) for a in losing)}."


def _place(advice: Advice) -> str:
    return f"{advice.workload} {load_in_words(advice.load)}"


def looping_sentence(results: Results) -> str | None:
    """Looping answers are easy to draft: they flatter acceptance."""
    runs = [run for cell in results.cells for run in usable_runs(cell)]
    share = looping_share(runs)
    if share is None:
        return None
    if not share:
        return "No answer repeats itself."
    return (
        f"{share:.0%} of the answers end in a loop that repeats itself, which is easy to draft; "
        "the tables give acceptance without them, too."
    )


def _bounds(interval: Interval) -> tuple[str, str]:
    if interval.low is None or interval.high is None:
        return "", ""
    return f"{interval.low:.2f}", f"{interval.high:.2f}"
