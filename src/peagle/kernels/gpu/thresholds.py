"""Which tokens min-p, top-k and top-p keep, without a sort: a threshold value for each row.

A token stays if its logit after temperature is above the threshold, or equal to it and its column
is not behind `last_column`. The k-th largest logit, and the last value of a nucleus, are the
largest threshold at or above which enough tokens, or enough mass, stand. It is found bit by bit,
among the 32-bit integers that are ordered as floats are: 32 looks at the row, which lies in the L2
cache.

Masses are float64 sums of float32 weights in one order. Where the mass before a token equals top-p
of the total up to about 1e-6 of it, speculation/sampling.py may decide differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

from peagle.kernels.gpu.argmax import row_peak

_ALL_COLUMNS = tl.constexpr(2**31 - 1)
_LOWEST_KEY = tl.constexpr(-(2**31) + 0x7FFFFF)  # of -inf


@triton.jit
def below_peak(scaled, peak):
    """How far logits lie below the largest; 0 for equal ones even if temperature made them inf."""
    return tl.where(scaled == peak, 0.0, scaled - peak)


@triton.jit
def thresholds_kernel(
    logits,
    row_stride,
    vocab_size,
    peaks,
    num_chunks,
    temperatures,
    top_k,
    top_p,
    min_p,
    thresholds,
    last_columns,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R,). thresholds float32, last_columns int32  # [R]; greedy rows keep all."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * row_stride
    temperature = tl.load(temperatures + row)
    raw_peak, usable = row_peak(peaks, row, num_chunks, CHUNKS)
    threshold = tl.full((), float("-inf"), tl.float32)
    last_column = tl.full((), _ALL_COLUMNS, tl.int32)
    if (temperature > 0) & usable:
        peak = tl.div_rn(raw_peak, temperature)
        threshold = _min_p_threshold(peak, tl.load(min_p + row))
        k = tl.load(top_k + row)
        if (k > 0) & (k < vocab_size):
            kth = _largest_threshold(
                row_logits,
                vocab_size,
                raw_peak,
                k.to(tl.float64),
                temperature,
                peak,
                threshold,
                False,
                BLOCK,
            )
            threshold = tl.maximum(threshold, tl.div_rn(kth, temperature))
        mass_share = tl.load(top_p + row)
        if mass_share < 1:
            lowest = tl.full((), float("-inf"), tl.float32)
            total = _measure(
                row_logits, vocab_size, lowest, temperature, peak, threshold, True, BLOCK
            )
            goal = mass_share.to(tl.float64) * total
            last = _largest_threshold(
                row_logits, vocab_size, raw_peak, goal, temperature, peak, threshold, True, BLOCK
            )
            threshold = tl.div_rn(last, temperature)
            num_equal = _num_equal(
                row_logits, vocab_size, threshold, goal, temperature, peak, BLOCK
            )
            last_column = _column_of(
                row_logits, vocab_size, threshold, num_equal, temperature, BLOCK
            )
    tl.store(thresholds + row, threshold)
    tl.store(last_columns + row, last_column)


@triton.jit
def _min_p_threshold(peak, min_p):
    on = min_p > 0
    return tl.where(on, peak + tl.log(tl.where(on, min_p, 1.0)), float("-inf"))


@triton.jit
def _largest_threshold(
    row_logits,
    vocab_size,
    raw_peak,
    enough,
    temperature,
    peak,
    floor,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest logit, before temperature, at or above which `enough` tokens or mass stand.

    Temperature keeps the order, so its place in the order is the same after it.
    """
    low = tl.full((), _LOWEST_KEY, tl.int64)  # there is enough at low, and not above high
    high = _flip(raw_peak.to(tl.int32, bitcast=True)).to(tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        value = _flip(middle.to(tl.int32)).to(tl.float32, bitcast=True)
        reached = (
            _measure(row_logits, vocab_size, value, temperature, peak, floor, MASS, BLOCK) >= enough
        )
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return _flip(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _flip(bits):
    """Bits of a float <-> integers in the order of the floats."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _measure(
    row_logits, vocab_size, value, temperature, peak, floor, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """How many logits are `value` or more; or their mass, relative to the most likely token's, as
    far as they are not below `floor` after temperature. float64"""
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocab_size, BLOCK):
        x, inside = _block(row_logits, vocab_size, start, BLOCK)
        counted = inside & (x >= value)
        if MASS:
            scaled = tl.div_rn(x, temperature)
            weights = tl.where(counted & (scaled >= floor), tl.exp(below_peak(scaled, peak)), 0.0)
        else:
            weights = tl.where(counted, 1.0, 0.0)
        sums += weights.to(tl.float64)
    return tl.sum(sums, 0)


@triton.jit
def _num_equal(row_logits, vocab_size, threshold, goal, temperature, peak, BLOCK: tl.constexpr):
    """How many of the tokens at the threshold have less than `goal` before them; at least 1."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocab_size, BLOCK):
        x, inside = _block(row_logits, vocab_size, start, BLOCK)
        scaled = tl.div_rn(x, temperature)
        above = inside & (scaled > threshold)
        sums += tl.where(above, tl.exp(below_peak(scaled, peak)), 0.0).to(tl.float64)
    mass_above = tl.sum(sums, 0)
    weight = tl.exp(below_peak(threshold, peak)).to(tl.float64)
    whole = tl.minimum((goal - mass_above) / weight, 1e9).to(tl.int32)  # fits an int32
    one_more = mass_above + whole.to(tl.float64) * weight < goal
    return tl.maximum(whole + one_more.to(tl.int32), 1)


@triton.jit
def _column_of(row_logits, vocab_size, threshold, number, temperature, BLOCK: tl.constexpr):
    """The column of the `number`-th token at the threshold."""
    seen = tl.full((), 0, tl.int32)
    column = tl.full((), _ALL_COLUMNS, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        x, inside = _block(row_logits, vocab_size, start, BLOCK)
        equal = inside & (tl.div_rn(x, temperature) == threshold)
        running = seen + tl.cumsum(equal.to(tl.int32), 0)
        hit = equal & (running == number)
        columns = tl.where(hit, start + tl.arange(0, BLOCK), _ALL_COLUMNS)
        column = tl.minimum(column, tl.min(columns, 0))
        seen += tl.sum(equal.to(tl.int32), 0)
    return column


@triton.jit
def _block(row_logits, vocab_size, start, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    return tl.load(row_logits + columns, mask=inside, other=float("-inf")).to(tl.float32), inside
