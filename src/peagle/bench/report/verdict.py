"""What the figures mean, in words: speed, sameness of output, looping, what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peagle.bench.analysis.gains import fastest_at
from peagle.bench.analysis.series import looping_share
from peagle.bench.analysis.tune import Advice, Tuning
from peagle.bench.results.document import (
    Agreement,
    AnswerDifference,
    Lossless,
    Results,
    is_busy,
)
from peagle.bench.results.figures import (
    bounds,
    count,
    counted,
    factor,
    factor_with_bounds,
    figure,
    joined,
    length,
    share,
)
from peagle.bench.results.settings import NONE, by_place, series_names, short_name, usable_runs

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
        return (
            "The gain from speculation is unknown: method none was not measured at any concurrency."
        )
    advice = tuning.overall
    if advice.off:
        return f"Speculation does not pay off over all of this traffic: {advice.why}."
    gain = advice.best.gain
    sure = "too few for an interval" if gain.low is None else "95 % interval"
    return (
        f"{advice.best.name} answers {factor(gain).rstrip('x')} times as fast as no speculation "
        f"over all that was measured ({bounds(gain)}, {sure})."
    )


def key_figures(results: Results, tuning: Tuning | None) -> list[KeyFigure]:
    figures = []
    if tuning is not None and not tuning.overall.off:
        best = tuning.overall.best
        figures.append(KeyFigure(factor(best.gain), f"speed with {best.name}"))
        if best.acceptance_length is not None:
            what = "mean acceptance length: tokens per verification step"
            figures.append(KeyFigure(length(best.acceptance_length), what))
    figures += _peak(results)
    if results.lossless is not None:
        figures += _equality(results.lossless, results.manifest.dtype)
    return figures


def _peak(results: Results) -> Iterator[KeyFigure]:
    """Of the cells that the tables of speeds mark, the fastest."""
    names = series_names(results.cells)
    marked = []
    for place, cells in by_place(results.cells).items():
        setting = fastest_at(place, cells)
        summary = cells[setting].summary()
        if not place.is_open_loop and summary is not None:
            marked.append((summary.otps, place, setting))
    if marked:
        speed, place, setting = max(marked, key=lambda found: found[0].value)
        where = f"{short_name(setting, names)}, {place.workload} {load_in_words(place.load)}"
        yield KeyFigure(figure(speed), f"output tokens per second at most: {where}")


def _equality(lossless: Lossless, dtype: str) -> Iterator[KeyFigure]:
    _, found = agreements(lossless)
    if found is None:
        return
    if not found.different:
        what = "greedy answers equal those without speculation, token for token"
        yield KeyFigure(f"{count(found.compared)} of {count(found.compared)}", what)
    elif found.largest_gap is None:
        what = f"of {count(found.compared)} greedy answers differ from those without speculation"
        yield KeyFigure(count(found.different), what)
    elif found.largest_gap <= _near_tie(dtype):
        what = f"of {counted(found.num_gaps, 'difference')} examined go beyond a near tie"
        yield KeyFigure("0", what)
    else:
        what = f"largest gap between two tokens: more than rounding in {dtype} explains"
        yield KeyFigure(f"{found.largest_gap:.2g}", what)


def sentences(results: Results, tuning: Tuning | None) -> Iterator[str]:
    """What follows the headline and the sentence on equality, most important first."""
    if tuning is not None:
        yield from _speed(tuning)
    busy = busy_sentence(results)
    if busy:
        yield busy
    looping = looping_sentence(results)
    if looping:
        yield looping
    if tuning is not None:
        yield from (f"{note[0].upper()}{note[1:]}." for note in tuning.notes)


def load_in_words(load: str) -> str:
    if load.endswith("/s"):
        return f"at {load.removesuffix('/s')} requests per second"
    return "with 1 request at a time" if load == "1" else f"with {load} requests at once"


def _speed(tuning: Tuning) -> Iterator[str]:
    gains = [a for a in tuning.by_load if not a.off]
    if len(tuning.by_load) > 1 and gains:
        most = max(gains, key=lambda a: a.best.gain.value)
        yield (
            f"The gain is largest {load_in_words(most.load)}: {factor_with_bounds(most.best.gain)} "
            f"with {most.best.name}."
        )
        if len(gains) > 1 and gains[-1] is not most:
            last = gains[-1]
            gain = factor_with_bounds(last.best.gain)
            yield (
                f"{load_in_words(last.load).capitalize()} it is {gain}, best with {last.best.name}."
            )
    off = [a for a in tuning.by_load if a.off]
    for advice in off:
        yield f"Speculation should be off {load_in_words(advice.load)}: {advice.why}."
    losing = [a for a in tuning.by_place if a.off and a.load not in {b.load for b in off}]
    if losing:
        yield f"It does not pay off for {joined([_place(a) for a in losing])}."


def _place(advice: Advice) -> str:
    return f"{advice.workload} {load_in_words(advice.load)}"


def looping_sentence(results: Results) -> str | None:
    """Looping answers are easy to draft: they flatter acceptance."""
    runs = [run for cell in results.cells for run in usable_runs(cell)]
    looping = looping_share(runs)
    if looping is None:
        return None
    if not looping:
        return "No answer repeats itself."
    return (
        f"{share(looping)} of the answers end in a loop that repeats itself, which is easy to "
        "draft; the tables give acceptance without them, too."
    )


def busy_sentence(results: Results) -> str | None:
    """Others' work on the machine, where it was measured; None on a quiet one."""
    runs = [run for cell in results.cells for run in usable_runs(cell)]
    busy = [r.other_cpu_share or 0.0 for r in runs if is_busy(r.other_cpu_share)]
    if not busy:
        return None
    return (
        f"Busy machine: during {count(len(busy))} of {counted(len(runs), 'run')} others took up to "
        f"{share(max(busy))} of the CPU time."
    )


def lossless_verdict(lossless: Lossless | None, dtype: str) -> str:
    """One sentence; `lossless_details` has the numbers behind it."""
    if lossless is None:
        return (
            "Whether the output is the same was not checked: answers were sampled, or method none "
            "or token ids were missing."
        )
    plain, found = agreements(lossless)
    if found is None or not found.different:
        compared = found.compared if found else lossless.compared
        whose = "greedy answers" + " with speculation" * (lossless.speculative is not None)
        return (
            f"Same output: all {count(compared)} {whose} equal plain decoding's, token for token."
        )
    differ = f"{count(found.different)} of {count(found.compared)} greedy answers differ"
    if found.largest_gap is None:
        return f"{differ} from plain decoding's; how close the tokens were is not known."
    if found.largest_gap > _near_tie(dtype):
        return f"{differ} by more than rounding in {dtype} usually explains. Look into it."
    too = ", as plain answers do between loads" if plain is not None and plain.different else ""
    return (
        f"Same output up to rounding: where answers diverge, the two tokens were nearly tied, and "
        f"{dtype} breaks such ties either way{too}."
    )


def lossless_details(lossless: Lossless | None, dtype: str) -> list[str]:
    """Empty where the verdict says all."""
    if lossless is None or not lossless.different:
        return []
    plain, found = agreements(lossless)
    sentences = []
    if found is not None:
        differ = f"With speculation {_count(found)} differ from plain decoding's somewhere."
        sentences.append(f"{differ} {_gaps(found)}")
    if plain is not None and plain.different:
        sentences.append(
            f"Without speculation {_count(plain)} differ from those of the smallest load as well, "
            f"because batches of another size are rounded differently. {_gaps(plain)}"
        )
    elif plain is not None:
        same = count(plain.compared)
        sentences.append(f"Without speculation all {same} are the same under every load.")
    if lossless.not_comparable:
        later = counted(lossless.not_comparable, "later turn")
        sentences.append(f"{later} of conversations that had differed were not compared.")
    sentences.append(f"In {dtype} a gap of up to {_near_tie(dtype):g} counts as a near tie.")
    return [sentence.strip() for sentence in sentences]


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


def _near_tie(dtype: str) -> float:
    return NEAR_TIE.get(dtype, NEAR_TIE_OTHERWISE)


def _count(found: Agreement) -> str:
    return f"{count(found.different)} of {count(found.compared)} greedy answers"


def _gaps(found: Agreement) -> str:
    if found.largest_gap is None:
        return ""
    middle = "" if found.median_gap is None else f", half of them at most {found.median_gap:.2g}"
    return (
        f"At the {counted(found.num_gaps, 'place')} that were examined the two tokens are at most "
        f"{found.largest_gap:.2g} apart in log-probability{middle}."
    )
