"""Rejection sampling in three kernels; the definition is speculation/verify.py.

The bonus token is an inverse CDF: sums of chunks first, by many programs, then a running sum in
the one chunk that holds it. All in float64, in an order that no other request changes.

Shapes: B requests, K draft tokens at most, V tokens, C chunks of the vocabulary. The distributions
are target_probs [B, K+1, V] and draft_probs [B, K, V], given with the strides of B and K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.noise import ACCEPT_OFFSET, RESIDUAL_OFFSET, stream_uniform
from peagle.kernels.reference.rejection import RejectionUniforms
from peagle.speculation.verify import PADDING, VerifyOutput

_CHUNK = 1024  # sums depend on it: the same for any number of requests
_NOWHERE = tl.constexpr(2**31 - 1)
_PADDING = tl.constexpr(PADDING)


def rejection_uniforms(seeds: Tensor, outputs: Tensor, depth: int) -> RejectionUniforms:
    """As kernels/reference/rejection.py, bit for bit, in one kernel."""
    batch = seeds.shape[0]
    accept = torch.empty(batch, depth, dtype=torch.float64, device=seeds.device)
    residual = torch.empty(batch, depth + 1, dtype=torch.float64, device=seeds.device)
    depths = triton.next_power_of_2(depth + 1)
    uniforms_kernel[(batch,)](
        seeds.contiguous(), outputs.contiguous(), accept, residual, depth, DEPTHS=depths
    )
    return RejectionUniforms(accept, residual)


def verify_rejection(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    accept_uniforms: Tensor,
    residual_uniforms: Tensor,
) -> VerifyOutput:
    """As speculation.verify.verify_rejection, up to the order of float64 sums."""
    return verify_in_chunks(
        target_probs,
        draft_probs,
        draft_tokens,
        num_drafts,
        accept_uniforms,
        residual_uniforms,
        _CHUNK,
    )


def verify_in_chunks(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    accept_uniforms: Tensor,
    residual_uniforms: Tensor,
    chunk: int,
) -> VerifyOutput:
    """`verify_rejection` with the vocabulary cut into chunks (a power of two) of this size."""
    assert target_probs.stride(2) == 1
    assert draft_probs.stride(2) == 1
    batch, depth = draft_tokens.shape
    vocab_size = target_probs.shape[2]
    probs = (target_probs, *target_probs.stride()[:2], draft_probs, *draft_probs.stride()[:2])
    tokens, num_drafts = draft_tokens.contiguous(), num_drafts.contiguous()
    num_accepted = torch.empty_like(num_drafts, dtype=torch.int64)
    accept_kernel[(batch,)](
        *probs,
        tokens,
        num_drafts,
        accept_uniforms.contiguous(),
        num_accepted,
        depth,
        DEPTHS=triton.next_power_of_2(depth + 1),
    )
    num_chunks = triton.cdiv(vocab_size, chunk)
    sums = target_probs.new_empty(2, batch, num_chunks, dtype=torch.float64)
    sums_kernel[(batch, num_chunks)](
        *probs, num_drafts, num_accepted, sums[0], sums[1], vocab_size, CHUNK=chunk
    )
    token_ids = torch.empty(batch, depth + 1, dtype=torch.int64, device=tokens.device)
    draw_kernel[(batch,)](
        *probs,
        tokens,
        num_drafts,
        num_accepted,
        residual_uniforms.contiguous(),
        sums[0],
        sums[1],
        token_ids,
        depth,
        vocab_size,
        num_chunks,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(num_chunks),
        DEPTHS=triton.next_power_of_2(depth + 1),
    )
    return VerifyOutput(num_accepted, token_ids)


@triton.jit
def uniforms_kernel(seeds, outputs, accept, residual, depth, DEPTHS: tl.constexpr):
    """Grid (B,). accept [B, K], residual [B, K+1]: one for each position from `outputs` [B] on."""
    row = tl.program_id(0).to(tl.int64)
    depths = tl.arange(0, DEPTHS)
    seed, positions = tl.load(seeds + row), tl.load(outputs + row) + depths.to(tl.int64)
    to_accept = stream_uniform(seed, positions, ACCEPT_OFFSET)
    tl.store(accept + row * depth + depths, to_accept, mask=depths < depth)
    to_draw = stream_uniform(seed, positions, RESIDUAL_OFFSET)
    tl.store(residual + row * (depth + 1) + depths, to_draw, mask=depths <= depth)


@triton.jit
def accept_kernel(
    target_probs,
    target_row,
    target_depth,
    draft_probs,
    draft_row,
    draft_depth,
    draft_tokens,
    num_drafts,
    accept_uniforms,
    num_accepted,
    depth,
    DEPTHS: tl.constexpr,
):
    """Grid (B,). How many drafts stand before the first that falls."""
    row = tl.program_id(0).to(tl.int64)
    depths = tl.arange(0, DEPTHS)
    drafted = (depths < tl.load(num_drafts + row)) & (depths < depth)
    at = row * depth + depths
    tokens = tl.load(draft_tokens + at, mask=drafted, other=0).to(tl.int64)
    p_at = row * target_row + depths.to(tl.int64) * target_depth + tokens
    q_at = row * draft_row + depths.to(tl.int64) * draft_depth + tokens
    p = tl.load(target_probs + p_at, mask=drafted, other=0.0).to(tl.float64)
    q = tl.load(draft_probs + q_at, mask=drafted, other=0.0).to(tl.float64)
    uniforms = tl.load(accept_uniforms + at, mask=drafted, other=0.0).to(tl.float64)
    accepted = drafted & (uniforms * q < p) & (q > 0)  # uniform < p/q, and q can have drawn it
    tl.store(num_accepted + row, tl.min(tl.where(accepted, DEPTHS, depths), 0).to(tl.int64))


@triton.jit
def _weights(p_row, q_row, rejected, columns, vocab_size):
    """p of these tokens and, after a rejection, max(p - q, 0), else 0. float64"""
    p = tl.load(p_row + columns, mask=columns < vocab_size, other=0.0).to(tl.float64)
    num_q = tl.where(rejected, vocab_size, 0)  # behind the last draft there is no q to read
    q = tl.load(q_row + columns, mask=columns < num_q, other=0.0).to(tl.float64)
    return p, tl.where((columns < num_q) & (p > q), p - q, 0.0)


@triton.jit
def sums_kernel(
    target_probs,
    target_row,
    target_depth,
    draft_probs,
    draft_row,
    draft_depth,
    num_drafts,
    num_accepted,
    p_sums,
    residual_sums,
    vocab_size,
    CHUNK: tl.constexpr,
):
    """Grid (B, C). Sums of p and of the residual over a chunk, at the depth of the bonus token."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    accepted = tl.load(num_accepted + row)
    rejected = accepted < tl.load(num_drafts + row)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    p_row = target_probs + row * target_row + accepted * target_depth
    q_row = draft_probs + row * draft_row + accepted * draft_depth
    p, residual = _weights(p_row, q_row, rejected, columns, vocab_size)
    at = row * tl.num_programs(1) + chunk
    tl.store(p_sums + at, tl.sum(p, 0))
    tl.store(residual_sums + at, tl.sum(residual, 0))


@triton.jit
def _pass(weights, places, before, goal):
    """The first place with weight at which the running sum is above the goal; where rounding
    leaves none, the last with weight; 0 if there is no weight at all."""
    has_weight = weights > 0
    running = before + tl.cumsum(weights, 0)
    first = tl.min(tl.where(has_weight & (running > goal), places, _NOWHERE), 0)
    last = tl.max(tl.where(has_weight, places, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def draw_kernel(
    target_probs,
    target_row,
    target_depth,
    draft_probs,
    draft_row,
    draft_depth,
    draft_tokens,
    num_drafts,
    num_accepted,
    residual_uniforms,
    p_sums,
    residual_sums,
    token_ids,
    depth,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    """Grid (B,). Draws the bonus token and writes the row of token ids."""
    row = tl.program_id(0).to(tl.int64)
    accepted = tl.load(num_accepted + row)
    rejected = accepted < tl.load(num_drafts + row)
    # 1. the distribution: the residual, or p where nothing was rejected or rounding left none
    chunks = tl.arange(0, CHUNKS)
    in_row = chunks < num_chunks
    p_sum = tl.load(p_sums + row * num_chunks + chunks, mask=in_row, other=0.0)
    residual_sum = tl.load(residual_sums + row * num_chunks + chunks, mask=in_row, other=0.0)
    by_residual = tl.sum(residual_sum, 0) > 0
    chunk_sums = tl.where(by_residual, residual_sum, p_sum)
    # 2. the chunk, then the token in it
    zero = tl.full((), 0.0, tl.float64)
    goal = tl.load(residual_uniforms + row * (depth + 1) + accepted).to(tl.float64)
    goal = goal * tl.sum(chunk_sums, 0)
    chunk = _pass(chunk_sums, chunks, zero, goal)
    before = tl.sum(tl.where(chunks < chunk, chunk_sums, 0.0), 0)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    p_row = target_probs + row * target_row + accepted * target_depth
    q_row = draft_probs + row * draft_row + accepted * draft_depth
    p, residual = _weights(p_row, q_row, rejected, columns, vocab_size)
    bonus = _pass(tl.where(by_residual, residual, p), columns, before, goal).to(tl.int64)
    # 3. accepted drafts, the bonus token, padding
    depths = tl.arange(0, DEPTHS)
    drafts = tl.load(draft_tokens + row * depth + depths, mask=depths < accepted, other=_PADDING)
    ids = tl.where(depths == accepted, bonus, drafts.to(tl.int64))
    tl.store(token_ids + row * (depth + 1) + depths, ids, mask=depths <= depth)
