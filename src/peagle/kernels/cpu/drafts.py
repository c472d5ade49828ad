"""The best tokens of rows, trees of drafts and the target's walk through them, by drafts.c.

They stand in for those of kernels/reference where these are a hundred small tensor operations of a
few microseconds each: for greedy rows and, where slots do not share rows, for the trees of a
drafter that makes one pass. Everything else goes to the references.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from peagle.config import MAX_DRAFT_NODES, MAX_SPECULATIVE_TOKENS
from peagle.kernels.cpu.library import Threads, cpu_library
from peagle.kernels.device_batch import DeviceBatch, StepCounts
from peagle.kernels.reference import sampling, trees
from peagle.kernels.reference.sampling import SampledTokens, SamplingMetadata
from peagle.kernels.reference.trees import Candidates, SharedRows, TreePath
from peagle.speculation.trees import BEAM, num_candidates

POINTER, SIZE = c_void_p, c_int64


class _Tree(ctypes.Structure):
    """`tree` in drafts.c."""

    _fields_ = tuple(
        (name, POINTER) for name in ("token_ids", "parents", "depths", "ancestors", "scores")
    )


@functools.cache
def draft_kernels() -> DraftKernels | None:
    """None where there is no library; decided once."""
    library = cpu_library()
    return None if library is None else DraftKernels(library)


class DraftKernels:
    """Signatures and meaning are the reference's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._best_columns = library.best_columns
        self._best_columns.argtypes = (*[POINTER] * 4, *[SIZE] * 4, POINTER)
        self._best_columns.restype = None
        self._grow_trees = library.grow_trees
        self._grow_trees.argtypes = (
            *(POINTER, SIZE, POINTER, POINTER, SIZE, POINTER, POINTER, POINTER),
            *(SIZE, SIZE, SIZE),
        )
        self._grow_trees.restype = None
        self._walk_trees = library.walk_trees
        self._walk_trees.argtypes = (
            *(POINTER, POINTER, SIZE, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE),
            *[POINTER] * 6,
        )
        self._walk_trees.restype = None
        self._move_rows = library.move_rows
        self._move_rows.argtypes = (
            *(POINTER, SIZE, SIZE, SIZE, POINTER, SIZE, SIZE, POINTER, POINTER, SIZE),
            *(POINTER, POINTER, SIZE),
        )
        self._move_rows.restype = None

    def sample_tokens(
        self,
        logits: Tensor,
        metadata: SamplingMetadata | None = None,
        ids: Tensor | None = None,
        *,
        filters: bool = True,
    ) -> SampledTokens:
        if metadata is not None or not _takes(logits):
            return sampling.sample_tokens(logits, metadata, ids, filters=filters)
        columns, usable = (
            logits.new_empty(len(logits), dtype=dtype) for dtype in (torch.int64, torch.bool)
        )
        self._find(logits, columns, None, usable)
        tokens = columns if ids is None else torch.where(usable, ids[columns], 0)
        return SampledTokens(tokens, usable)

    def top_tokens(
        self,
        logits: Tensor,
        metadata: SamplingMetadata | None,
        ids: Tensor | None,
        count: int,
        *,
        filters: bool = True,
    ) -> Candidates:
        if metadata is not None or not _takes(logits) or count > BEAM:
            return trees.top_tokens(logits, metadata, ids, count, filters=filters)
        columns = logits.new_empty((len(logits), count), dtype=torch.int64)
        log_probs = logits.new_empty((len(logits), count))
        self._find(logits, columns, log_probs, None)
        return Candidates(columns if ids is None else ids[columns], log_probs)

    def _find(
        self, logits: Tensor, columns: Tensor, log_probs: Tensor | None, usable: Tensor | None
    ) -> None:
        team = Threads()  # named: it must outlive the call
        self._best_columns(
            columns.data_ptr(),
            None if log_probs is None else log_probs.data_ptr(),
            None if usable is None else usable.data_ptr(),
            logits.data_ptr(),
            *logits.shape,
            logits.stride(0),
            columns.numel() // max(len(columns), 1),
            ctypes.addressof(team),
        )

    def store_tree(
        self,
        state: DeviceBatch,
        slots: Tensor,
        token_ids: Tensor,
        log_probs: Tensor,
        num_depths: Tensor,
        num_nodes: int,
    ) -> None:
        batch, depth, beam = log_probs.shape[:3]
        fits = log_probs.dtype is torch.float32 and beam <= BEAM and depth <= MAX_SPECULATIVE_TOKENS
        if token_ids.dim() == 4 or not fits:
            trees.store_tree(state, slots, token_ids, log_probs, num_depths, num_nodes)
            return
        assert state.trees is not None
        assert 1 <= num_nodes <= MAX_DRAFT_NODES
        columns = state.drafts, *state.trees, state.draft_scores
        assert all(column is None or column.is_contiguous() for column in columns)
        places = _Tree(*(None if column is None else column.data_ptr() for column in columns))
        slots, num_depths = slots.contiguous(), num_depths.contiguous()
        token_ids, log_probs = token_ids.contiguous(), log_probs.contiguous()
        self._grow_trees(
            ctypes.addressof(places),
            state.drafts.shape[1],
            state.num_drafts.data_ptr(),
            slots.data_ptr(),
            batch,
            token_ids.data_ptr(),
            log_probs.data_ptr(),
            num_depths.data_ptr(),
            depth,
            beam,
            min(num_nodes, num_candidates(depth, beam)),
        )

    def walk_tree(
        self,
        counts: StepCounts,
        sampled: Tensor,
        usable: Tensor,
        depth: int,
        shared: SharedRows | None = None,
    ) -> TreePath:
        if shared is not None:
            return trees.walk_tree(counts, sampled, usable, depth, shared)
        assert counts.tree is not None
        batch = len(counts.drafts)
        drafts, parents = counts.drafts, counts.tree.parents
        if drafts.stride() != parents.stride():
            drafts, parents = drafts.contiguous(), parents.contiguous()
        num_drafts = counts.num_drafts.contiguous()
        sampled, usable = sampled.contiguous(), usable.contiguous()
        long = functools.partial(sampled.new_empty, dtype=torch.int64)
        path = TreePath(
            long((batch, depth)),
            long((batch, depth + 1)),
            usable.new_empty((batch, depth + 1)),
            long((batch, depth + 1)),
            long((batch,)),
            long((batch, depth + 1)),
        )
        self._walk_trees(
            drafts.data_ptr(),
            parents.data_ptr(),
            drafts.stride(0),
            num_drafts.data_ptr(),
            sampled.data_ptr(),
            usable.data_ptr(),
            sampled.shape[1],
            batch,
            depth,
            *(part.data_ptr() for part in path),
        )
        return path

    def move_rows(
        self,
        keys: Tensor,
        values: Tensor,
        block_tables: Tensor,
        slots: Tensor,
        starts: Tensor,
        path: TreePath,
        block_size: int,
    ) -> None:
        caches = keys, values
        if not all(c.dtype is torch.float32 and c[0].is_contiguous() for c in caches):
            trees.move_rows(keys, values, block_tables, slots, starts, path, block_size)
            return
        slots, starts, rows = slots.contiguous(), starts.contiguous(), path.rows.contiguous()
        num_accepted = path.num_accepted.contiguous()
        for cache in caches:
            self._move_rows(
                cache.data_ptr(),
                len(cache),
                cache.stride(0),
                cache.stride(1),
                block_tables.data_ptr(),
                block_tables.stride(0),
                block_size,
                slots.data_ptr(),
                starts.data_ptr(),
                len(rows),
                rows.data_ptr(),
                num_accepted.data_ptr(),
                rows.shape[1] - 1,
            )


def _takes(logits: Tensor) -> bool:
    """Whether rows [R, V] are as the kernel reads them."""
    return logits.dtype is torch.float32 and logits.stride(1) == 1 and logits.shape[1] > 0
