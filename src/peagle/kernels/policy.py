"""Which kernel takes which rows of a model on a GPU: the two policies, in one place.

FAST takes what is quickest for the number of rows at hand. So a row's sums may have another order
beside other rows than alone, and in half precision near ties may be decided otherwise.

BATCH_INVARIANT takes kernels that give a row the same bits alone, beside drafts, beside other
requests and inside a prompt: every sum is one chain along the inputs, whatever the tile
(gpu/linear.py), attention is cut at fixed positions (gpu/attention.py) and logits are the same
product however tokens are sampled. It is bound to the target (models/binding.py); wrong drafts cost
time and nothing else, so a drafter stays with FAST.

No Triton here. Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HALF = torch.bfloat16, torch.float16  # what the tensor cores sum up in float32
MAX_SMALL_WEIGHT = 4_000_000  # elements of one matrix; beyond, products are bound by its bytes


@dataclass(frozen=True)
class Policy:
    batch_invariant: bool
    # Of the fused products of small weights; beyond, cuBLAS is ahead. None: any number.
    max_fused_rows: int | None
    # Of those with the norm's sums inside: with more rows it costs the product more than a launch.
    max_normed_rows: int
    # Of queries, keys and values in one kernel: with more it is slower than two.
    max_turned_rows: int
    # Up to so many rows the output product is bound by reading the table, at which cuBLAS is good,
    # and the logits are small beside it. So verification of one request also keeps plain
    # decoding's bits.
    max_logit_rows: int

    def fits_fused(self, x: Tensor, weights: Sequence[Tensor]) -> bool:
        """Whether products of x [M, K] with these belong to `fused_linear`.

        In FAST float16 might overflow there: it is normed only after the product.
        """
        if self.batch_invariant:
            return True
        assert self.max_fused_rows is not None
        few_rows = x.shape[0] <= self.max_fused_rows
        return few_rows and all(map(is_small, weights)) and x.dtype is not torch.float16

    def norms_inside(self, x: Tensor, weight: Tensor) -> bool:
        """Whether `fused_linear` takes the norm of x [M, K], too.

        Batch-invariant ones are decided by the weight [N, K] and not by the rows. Squares of
        bfloat16 are exact in float32, and it has float32's range.
        """
        if self.batch_invariant:
            return x.dtype is torch.bfloat16 and is_small(weight)
        return x.shape[0] <= self.max_normed_rows

    def greedy_without_logits(self, hidden: Tensor) -> bool:
        """Whether greedy tokens of these rows [M, K] are found by `best_tokens`."""
        return hidden.shape[0] > self.max_logit_rows and hidden.dtype in HALF


FAST = Policy(
    batch_invariant=False,
    max_fused_rows=512,
    max_normed_rows=16,
    max_turned_rows=32,
    max_logit_rows=32,
)
BATCH_INVARIANT = Policy(
    batch_invariant=True,
    max_fused_rows=None,
    max_normed_rows=16,
    max_turned_rows=16,
    max_logit_rows=0,
)


def is_small(weight: Tensor) -> bool:
    return weight.numel() <= MAX_SMALL_WEIGHT


def gpu_takes(x: Tensor) -> bool:
    """Whether Triton kernels may stand in for torch's operations on x: on a GPU, in a precision
    that they know, and where no gradient is wanted."""
    untracked = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return x.is_cuda and x.dtype in (*HALF, torch.float32) and untracked
