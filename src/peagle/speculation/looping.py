"""Whether an answer repeats itself. A drafter predicts a loop almost perfectly, so acceptance is
reported without looping answers. Imports no torch.

A loop is a contiguous range of at least MIN_TOKENS tokens that is periodic with some period
1 <= p <= MAX_PERIOD and holds at least MIN_COPIES whole copies of it: every token of the range,
the first p excepted, equals the token p before it. The loop may stand anywhere in the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_COPIES = 3
MIN_TOKENS = 24


def is_looping(token_ids: Sequence[int]) -> bool:
    """True if the tokens contain or end in a loop, as defined at the top of this file."""
    return loop_start(token_ids) is not None


def loop_start(token_ids: Sequence[int]) -> int | None:
    """Index of the first token (of the first copy) of the loop that begins earliest, or None.

    All periods at once: `prepare` asks for every answer, and a loop over them in Python would
    take longer than a GPU needs for the answer.
    """
    import numpy as np  # half a second that `peagle --help` does without

    length = len(token_ids)
    if length < MIN_TOKENS:
        return None
    tokens = np.asarray(token_ids)
    places = np.arange(length, dtype=np.int32)
    periods = np.arange(1, min(MAX_PERIOD, length - 1) + 1, dtype=np.int32)[:, None]  # [P, 1]
    earlier = places - periods  # [P, n]
    repeats = (earlier >= 0) & (tokens == tokens[earlier.clip(min=0)])
    last_break = np.maximum.accumulate(np.where(repeats, -1, places), axis=1)
    num_repeats = places - last_break  # in a row, up to here
    needed = np.maximum(MIN_COPIES * periods, MIN_TOKENS) - periods
    starts = np.where(num_repeats >= needed, last_break + 1 - periods, length)
    first = int(starts.min())
    return first if first < length else None
