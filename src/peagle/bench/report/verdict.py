"""What the figures mean, in words: speed, sameness of output, looping, what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peagle.bench.analysis.series import looping_share
from peagle.bench.analysis.tune import Advice, Tuning, gain_in_words
from peagle.bench.results.document import Agreement, AnswerDifference, Lossless, Results
from peagle.bench.results.intervals import Interval
from peagle.bench.results.settings import NONE, usable_runs

# Two tokens within it (log-probability) are a tie that rounding may break either way.
NEAR_TIE = {"float32": 1e-3}
# 16-bit numbers: without any speculation, HumanEval's answers of one and of 32 requests at once
# part where tokens are up to 0.65 apart (benchmarks/results/lossless_h200.json).
NEAR_TIE_OTHERWISE = 1.0


@dataclass(frozen=True)
class KeyFigure:
    """One of the large figures at the top."""

    value: str
    what: str


def headline(tuning: Tuning | None) -> str:
    if tuning is None:
        return "What speculation gains is not known: method none was not measured at a concurrency."
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
            f"The gain is largest {load_in_words(most.load)}: {gain_in_words(most.best.gain)} "
            f"with {most.best.name}."
        )
        if len(gains) > 1 and gains[-1] is not most:
            last = gains[-1]
            yield (
                f"{load_in_words(last.load).capitalize()} it is {gain_in_words(last.best.gain)}, "
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


def lossless_verdict(lossless: Lossless | None, dtype: str) -> str:
    if lossless is None:
        return (
            "Sameness of output was not checked: answers were sampled, or method none or token "
            "ids were missing."
        )
    if not lossless.different:
        return (
            f"Same output: all {lossless.compared} greedy answers equal those without "
            "speculation, token for token."
        )
    plain, speculative = agreements(lossless)
    words = []
    if speculative is not None:
        words.append(f"{_count(speculative)} with speculation leave those without it somewhere.")
        words.append(_gaps(speculative, dtype))
    if plain is not None and plain.different:
        words.append(
            f"Without speculation {_count(plain)} leave those of the smallest load as well, "
            f"because batches of another size are rounded differently. {_gaps(plain, dtype)}"
        )
    elif plain is not None and speculative is not None:
        words.append(f"Without speculation all {plain.compared} are the same under every load.")
    return " ".join(words)


def agreements(lossless: Lossless) -> tuple[Agreement | None, Agreement | None]:
    """Those without speculation and those with it; results that do not tell them apart count as
    with it."""
    if lossless.plain is None and lossless.speculative is None:
        return None, _of_differences(lossless)
    return lossless.plain, lossless.speculative


def _of_differences(lossless: Lossless) -> Agreement:
    speculative: list[AnswerDifference] = [d for d in lossless.differences if d.method != NONE]
    gaps = [abs(d.gap) for d in speculative if d.gap is not None]
    largest = max(gaps, default=None)
    return Agreement(lossless.compared, lossless.different, len(gaps), None, largest)


def _count(found: Agreement) -> str:
    return f"{found.different} of {found.compared} greedy answers"


def _gaps(found: Agreement, dtype: str) -> str:
    if not found.different:
        return ""
    if found.largest_gap is None:
        return "How close the two tokens were is not known."
    bound = NEAR_TIE.get(dtype, NEAR_TIE_OTHERWISE)
    middle = "" if found.median_gap is None else f", half of them at most {found.median_gap:.2g}"
    worst = (
        f"At the {found.num_gaps} of these places that were looked at the two tokens are at most "
        f"{found.largest_gap:.2g} apart in log-probability{middle}"
    )
    if found.largest_gap <= bound:
        return f"{worst}: near ties that rounding in {dtype} breaks either way."
    return f"{worst}: more than rounding in {dtype} was seen to explain ({bound:g}). Look into it."
