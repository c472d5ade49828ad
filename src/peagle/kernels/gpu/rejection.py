"""Rejection sampling in three kernels; the definition is speculation/verify.py.

The bonus token is an inverse CDF: sums of chunks first, by many programs, then a running sum in
the one chunk that holds it. All in float64, in an order that no other request changes.

Shapes: B requests, K draft tokens at most, V tokens, C chunks of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from peagle.kernels.gpu.rejection_kernels import (
    accept_kernel,
    coins_kernel,
    draw_kernel,
    sums_kernel,
)
from peagle.kernels.reference.rejection import Coins, Verdict

_CHUNK = 1024  # sums depend on it: the same for any number of requests


def rejection_coins(seeds: Tensor, outputs: Tensor, depth: int) -> Coins:
    """As kernels/reference/rejection.py, bit for bit, in one kernel."""
    batch = seeds.shape[0]
    accept = torch.empty(batch, depth, dtype=torch.float64, device=seeds.device)
    residual = torch.empty(batch, depth + 1, dtype=torch.float64, device=seeds.device)
    depths = triton.next_power_of_2(depth + 1)
    coins_kernel[(batch,)](
        seeds.contiguous(), outputs.contiguous(), accept, residual, depth, DEPTHS=depths
    )
    return Coins(accept, residual)


def verify_rejection(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    accept_coins: Tensor,
    residual_coins: Tensor,
) -> Verdict:
    """As speculation.verify.verify_rejection, up to the order of float64 sums."""
    return verify_in_chunks(
        target_probs, draft_probs, draft_tokens, num_drafts, accept_coins, residual_coins, _CHUNK
    )


def verify_in_chunks(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    accept_coins: Tensor,
    residual_coins: Tensor,
    chunk: int,
) -> Verdict:
    """`verify_rejection` with the vocabulary cut into chunks (a power of two) of this size."""
    assert target_probs.stride(2) == 1
    assert draft_probs.stride(2) == 1
    batch, depth = draft_tokens.shape
    vocab_size = target_probs.shape[2]
    laws = (target_probs, *target_probs.stride()[:2], draft_probs, *draft_probs.stride()[:2])
    tokens, num_drafts = draft_tokens.contiguous(), num_drafts.contiguous()
    num_accepted = torch.empty_like(num_drafts, dtype=torch.int64)
    accept_kernel[(batch,)](
        *laws,
        tokens,
        num_drafts,
        accept_coins.contiguous(),
        num_accepted,
        depth,
        DEPTHS=triton.next_power_of_2(depth + 1),
    )
    num_chunks = triton.cdiv(vocab_size, chunk)
    sums = target_probs.new_empty(2, batch, num_chunks, dtype=torch.float64)
    sums_kernel[(batch, num_chunks)](
        *laws, num_drafts, num_accepted, sums[0], sums[1], vocab_size, CHUNK=chunk
    )
    token_ids = torch.empty(batch, depth + 1, dtype=torch.int64, device=tokens.device)
    draw_kernel[(batch,)](
        *laws,
        tokens,
        num_drafts,
        num_accepted,
        residual_coins.contiguous(),
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
    return Verdict(num_accepted, token_ids)
