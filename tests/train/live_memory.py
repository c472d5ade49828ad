"""What a step allocates, and an attention that keeps what a kernel keeps."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peagle.kernels.reference.attention import PLAIN, Scores


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations made inside and that are still there; keeps the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs or {})
        for storage in _storages(result):
            if id(storage) not in given and storage not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._drop, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _drop(self, size: int) -> None:
        self.now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, Tensor)]


class KernelAttention:
    """Each row sees itself alone. Keeps what FlexAttention keeps: q, k, v, output, sums."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        return self.with_lse(q, k, v, window)[0]

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = _Kernel.apply(q, k, v)  # type: ignore[no-untyped-call]
        return out, lse


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        lse = q.new_zeros(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _ = ctx.saved_tensors
        per_key = gradients[0].unflatten(1, (v.shape[1], -1)).sum(2)
        return torch.zeros_like(q), torch.zeros_like(k), per_key
