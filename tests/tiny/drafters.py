"""Drafters that run outside of an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from peagle.engine.blocks import BlockTable
from peagle.engine.kv_cache import PagedKVCache
from peagle.engine.row_layouts import ExactLayout, PagedModel
from peagle.kernels.step_ops import step_ops
from peagle.models.drafter import DraftBatch, NetworkDrafter, Packing
from peagle.models.output import OutputRows


def propose(
    drafter: NetworkDrafter,
    tokens: Tensor,
    aux_hidden_states: Tensor,
    k: int,
    sample: Callable[[OutputRows, int, Packing], Tensor],
) -> list[int]:
    """k drafts behind the tokens [n] of one sequence, of which [n - 1] have hidden states."""
    assert drafter.cache_layout is not None
    num_rows, block = len(tokens) - 1, BlockTable(len(tokens) + k, range(0))
    block.append(0)
    cache = PagedKVCache(
        drafter.cache_layout, block.capacity, aux_hidden_states.dtype, aux_hidden_states.device
    )
    model, layout = PagedModel(cache, block.capacity - 1), ExactLayout([block])
    batch = DraftBatch(
        slots=torch.tensor([0]),
        tokens=tokens[None, 1:],
        aux_hidden_states=aux_hidden_states[:num_rows],
        starts=torch.tensor([0]),
        num_real=torch.tensor([num_rows]),
        num_rows=torch.tensor([num_rows + k - 1]),
        num_drafts=torch.tensor([k]),
        depth=k,
        prompt=None,
        attend=lambda items: layout.rows(model, items, 1),
        pack=layout.pack,
        pack_depths=partial(layout.pack_depths, torch.tensor([k])),
        sample=sample,
        ops=step_ops(aux_hidden_states.device),
    )
    drafts: list[int] = drafter.propose(batch)[0].tolist()
    return drafts
