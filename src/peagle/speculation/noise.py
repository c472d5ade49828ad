"""Random numbers without a generator: each is a hash of (seed, position, token id).

A draw depends on nothing else: not on the batch, the step, the drafter or the device. That is
what lets target and drafter share the noise of a position, a preempted request replay itself,
and a CUDA graph capture sampling. Uniforms are bit-equal on every device; gumbels only up to
the last bits of the device's `log`.

Shapes: R rows, V tokens. Seeds use all 64 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15  # odd and without pattern: 2^64 / golden ratio
_MIX64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64's finaliser
_MIX32 = (0x7FEB352D, 0x846CA68B)  # "lowbias32" of the hash-prospector project

# Domains keep the vocabulary noise, the streams and derived seeds apart.
_DOMAIN_VOCAB = 1
_DOMAIN_SEED = 2
_DOMAIN_STREAMS = 16

ACCEPT_STREAM, RESIDUAL_STREAM = 0, 1  # rejection's uniforms: to accept, to draw again

_BELOW_ONE = 1.0 - 2.0**-24  # largest float32 below 1


def uniform_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """One uniform per token, float32 [R, V], strictly between 0 and 1.

    seeds, positions  # [R] int64
    """
    bits = _vocab_bits(seeds, positions, vocab_size)  # [R, V] int32 in [0, 2^31)
    # float32 keeps all 31 bits near 0 and 24 near 1, where the top ones would round up to 1.
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """One standard Gumbel per token, float32 [R, V], finite: -log(-log(1 - u)).

    1 - u is as uniform as u. The large Gumbels, which decide who is sampled, come from u near 0,
    where it is finest: tokens down to probability 2^-31 keep their share.
    """
    return uniform_noise(seeds, positions, vocab_size).neg_().log1p_().neg_().log_().neg_()


def stream_uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """One uniform per row, float64 [R], strictly between 0 and 1; independent of other streams
    and of the vocabulary noise."""
    bits = _shift_right(_row_keys(seeds, positions, _DOMAIN_STREAMS + stream), 12, 64)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)  # 52 bits and a half: exact


def derive_seed(seed: int, index: int) -> int:
    """Seed of answer `index` of a request with n > 1; fits an int64 tensor.

    Answer 0 keeps the request's own seed, so it is the answer that n = 1 would give.
    """
    if index == 0:
        return _signed(seed, 64)
    state = _mix64_int(seed + _DOMAIN_SEED * _GOLDEN64) ^ (index * _GOLDEN64)
    return _signed(_mix64_int(state), 64)


def _vocab_bits(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """31 random bits per token: two 32-bit mixing rounds, each keyed by half of the row's key.

    int32 with wraparound is twice as quick on a CPU as int64 with masks.
    """
    keys = _row_keys(seeds, positions, _DOMAIN_VOCAB).unsqueeze(1)  # [R, 1]
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    tokens = _mix32_(torch.arange(1, vocab_size + 1, dtype=torch.int32, device=seeds.device))
    bits = _mix32_(tokens ^ low)  # [R, V]
    return _mix32_(bits.add_(high)).bitwise_and_(0x7FFFFFFF)


def _row_keys(seeds: Tensor, positions: Tensor, domain: int) -> Tensor:
    """64 random bits per (seed, position) in a domain.  # [R] int64"""
    keyed = _mix64(seeds + _signed(domain * _GOLDEN64, 64))
    return _mix64(keyed ^ (positions * _signed(_GOLDEN64, 64)))


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30, 64)) * _signed(_MIX64[0], 64)
    x = (x ^ _shift_right(x, 27, 64)) * _signed(_MIX64[1], 64)
    return x ^ _shift_right(x, 31, 64)


def _mix64_int(x: int) -> int:
    x &= _MASK64
    x = ((x ^ (x >> 30)) * _MIX64[0]) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX64[1]) & _MASK64
    return x ^ (x >> 31)


def _mix32_(x: Tensor) -> Tensor:
    """Mixes an int32 tensor in place."""
    x.bitwise_xor_(_shift_right(x, 16, 32)).mul_(_signed(_MIX32[0], 32))
    x.bitwise_xor_(_shift_right(x, 15, 32)).mul_(_signed(_MIX32[1], 32))
    return x.bitwise_xor_(_shift_right(x, 16, 32))


def _shift_right(x: Tensor, count: int, width: int) -> Tensor:
    """Logical shift: torch's own `>>` copies the sign bit in."""
    return (x >> count).bitwise_and_((1 << (width - count)) - 1)


def _signed(x: int, width: int) -> int:
    """The same bits as a two's complement number: torch takes no unsigned scalars."""
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x
