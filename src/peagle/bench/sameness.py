"""What the check of losslessness found, in plain words."""

from __future__ import annotations

from peagle.bench.results import Agreement, Difference, Lossless
from peagle.bench.settings import NONE

# Two tokens within it (log-probability) are a tie that rounding may break either way.
NEAR_TIE = {"float32": 1e-3}
# 16-bit numbers: without any speculation, HumanEval's answers of one and of 32 requests at once
# part where tokens are up to 0.62 apart (benchmarks/results/lossless_h200.json).
NEAR_TIE_OTHERWISE = 1.0


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
    """Without and with speculation. Results of before they were kept apart count as with."""
    if lossless.plain is None and lossless.speculative is None:
        return None, _of_differences(lossless)
    return lossless.plain, lossless.speculative


def _of_differences(lossless: Lossless) -> Agreement:
    speculative: list[Difference] = [d for d in lossless.differences if d.method != NONE]
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
