"""The noise of speculation/noise.py inside a kernel: the same bits, gumbels up to a few last bits.

Unsigned integers throughout: their right shifts bring in zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from peagle.speculation import noise

_GOLDEN64 = tl.constexpr(noise._GOLDEN64)
_FIRST64, _SECOND64 = tl.constexpr(noise._MIX64[0]), tl.constexpr(noise._MIX64[1])
_FIRST32, _SECOND32 = tl.constexpr(noise._MIX32[0]), tl.constexpr(noise._MIX32[1])
_VOCAB_OFFSET = tl.constexpr(noise._DOMAIN_VOCAB * noise._GOLDEN64 & noise._MASK64)
ACCEPT_OFFSET = tl.constexpr(
    (noise._DOMAIN_STREAMS + noise.ACCEPT_STREAM) * noise._GOLDEN64 & noise._MASK64
)
RESIDUAL_OFFSET = tl.constexpr(
    (noise._DOMAIN_STREAMS + noise.RESIDUAL_STREAM) * noise._GOLDEN64 & noise._MASK64
)
_BELOW_ONE = tl.constexpr(noise._BELOW_ONE)


@triton.jit
def vocab_key(seed, position):
    """The 64 bits that all tokens of a row share; seed, position: int64."""
    return _row_key(seed, position, _VOCAB_OFFSET)


@triton.jit
def stream_uniform(seed, position, OFFSET: tl.constexpr):
    """The uniform of a position in the stream with this offset, float64; the definition's bits."""
    bits = (_row_key(seed, position, OFFSET) >> 12).to(tl.int64)
    return (bits.to(tl.float64) + 0.5) * (2.0**-52)


@triton.jit
def gumbel(key, token_ids):
    """Standard Gumbels, float32, for tokens [N] int32 of the row with this key."""
    return gumbel_of(uniform(key, token_ids))


@triton.jit
def gumbel_of(u):
    """-log(-log1p(-u)), within 2e-6 of the true value for every u that `uniform` gives.

    Triton has no log1p. log(w) * u / (1 - w) with w = 1 - u rounded is it to a few last bits, for
    what w lost is missing in 1 - w too. log(1 - u) alone would not do: the large Gumbels, which
    decide who is sampled, come from small u.
    """
    w = 1.0 - u
    lost = tl.where(w == 1.0, 1.0, 1.0 - w)  # w is 1 for the smallest u: -log1p(-u) is u there
    exponential = tl.where(w == 1.0, u, -tl.log(w) * tl.div_rn(u, lost))
    return -tl.log(exponential)


@triton.jit
def uniform(key, token_ids):
    bits = (_vocab_bits(key, token_ids) & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
    return tl.minimum((bits + 0.5) * (2.0**-31), _BELOW_ONE)


@triton.jit
def _row_key(seed, position, OFFSET: tl.constexpr):
    keyed = _mix64(seed.to(tl.uint64) + tl.full((), OFFSET, tl.uint64))
    return _mix64(keyed ^ (position.to(tl.uint64) * tl.full((), _GOLDEN64, tl.uint64)))


@triton.jit
def _vocab_bits(key, token_ids):
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    tokens = _mix32((token_ids + 1).to(tl.uint32))
    return _mix32(_mix32(tokens ^ low) + high)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * tl.full((), _FIRST64, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _SECOND64, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * tl.full((), _FIRST32, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), _SECOND32, tl.uint32)
    return x ^ (x >> 16)
