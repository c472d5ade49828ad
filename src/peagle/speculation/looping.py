"""Does an answer repeat itself? A drafter predicts a loop almost perfectly, so acceptance is
reported without looping answers. Imports no torch.

A loop is a contiguous range of at least MIN_TOKENS tokens that is periodic with some period
1 <= p <= MAX_PERIOD and holds at least MIN_COPIES whole copies of it: every token of the range,
the first p excepted, equals the token p before it. The loop may stand anywhere in the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import eq

MAX_PERIOD = 64
MIN_COPIES = 3
MIN_TOKENS = 24


def is_looping(token_ids: Sequence[int]) -> bool:
    """True if the tokens contain or end in a loop, as defined at the top of this file."""
    return loop_start(token_ids) is not None


def loop_start(token_ids: Sequence[int]) -> int | None:
    """Index of the first token (of the first copy) of the loop that begins earliest, or None."""
    starts = (_first_run(token_ids, period) for period in range(1, MAX_PERIOD + 1))
    return min((start for start in starts if start is not None), default=None)


def _first_run(token_ids: Sequence[int], period: int) -> int | None:
    """Start of the first loop with this period, or None."""
    needed = max(MIN_COPIES * period, MIN_TOKENS) - period  # equalities in a row
    start = 0
    for equal, run in groupby(map(eq, token_ids[period:], token_ids)):
        length = sum(1 for _ in run)
        if equal and length >= needed:
            return start
        start += length
    return None
