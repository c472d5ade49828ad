"""What the check of losslessness found, in plain words."""

from __future__ import annotations

from peagle.bench.results import Difference, Lossless
from peagle.bench.settings import NONE

# Two tokens within it (log-probability) are a tie that rounding may break either way.
NEAR_TIE = {"float32": 1e-3}
NEAR_TIE_OTHERWISE = 0.25  # 16-bit numbers: one step of a logit around 20 is 0.125


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
    count = f"{lossless.different} of {lossless.compared} greedy answers"
    speculative = [d for d in lossless.differences if d.method != NONE]
    own = len(lossless.differences) - len(speculative)
    by_none = f" ({own} of them without speculation, too, under another load)" if own else ""
    gaps = _gaps(lossless.differences, dtype)
    return f"{count} differ from those without speculation{by_none}. {gaps}"


def _gaps(differences: list[Difference], dtype: str) -> str:
    gaps = [abs(d.gap) for d in differences if d.gap is not None]
    if not gaps:
        return "How close the two tokens were is not known."
    bound = NEAR_TIE.get(dtype, NEAR_TIE_OTHERWISE)
    worst = f"The two tokens were at most {max(gaps):.2g} apart in log-probability"
    if max(gaps) <= bound:
        return f"{worst}: near ties that rounding in {dtype} breaks either way."
    return f"{worst}: more than rounding in {dtype} explains ({bound:g}). Look into it."
