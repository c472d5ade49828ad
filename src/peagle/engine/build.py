"""What the steps of an engine share: models, caches, the state of its slots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.engine.blocks import BlockAllocator, BlockTable
from peagle.engine.host_batch import Column
from peagle.engine.kv_cache import PagedKVCache
from peagle.engine.layer_groups import LayerGroups, LayerPlace
from peagle.engine.row_layouts import ExactLayout, PaddedLayout, PagedModel, RowLayout
from peagle.engine.runner import BATCH_SIZES, Runner, padded
from peagle.engine.step import Drafting, StepModels
from peagle.kernels.device_batch import make_device_batch
from peagle.kernels.step_ops import step_ops
from peagle.models.drafter import CacheLayout, Drafter, HostDrafter, NetworkDrafter
from peagle.models.target import TargetModel
from peagle.speculation.budget import DraftBudget, DraftNodes
from peagle.speculation.draft_limit import num_draft_rows
from peagle.speculation.node_budget import NodeBudget

if TYPE_CHECKING:
    from peagle.engine.engine import Speculation

# Rows that take as long as all else in a step, where nothing has been measured yet: a GPU reads
# weights for as long as it computes a few hundred of them.
FREE_ROWS = {"cuda": 256.0, "cpu": 24.0}


def host_drafter(drafter: Drafter | None) -> HostDrafter | None:
    is_on_host = drafter is not None and drafter.cache_layout is None
    return cast(HostDrafter, drafter) if is_on_host else None


def make_runner(
    target: TargetModel,
    speculation: Speculation | None,
    allocator: BlockAllocator,
    groups: LayerGroups,
    *,
    max_num_seqs: int,
    max_model_len: int,
    cache_len: int,  # positions that a request's blocks may have
    static: bool,
) -> Runner:
    weight = target.embed_tokens.weight
    drafter = speculation.drafter if speculation else None
    ops = step_ops(weight.device)
    state = make_device_batch(
        max_num_seqs,
        allocator.blocks_for(cache_len),
        _max_drafts(speculation),
        weight.device,
        draft_probs_shape(speculation, target),
        num_tables=len(groups.windows),
        has_trees=speculation is not None and speculation.num_draft_nodes is not None,
        keeps_scores=speculation is not None and speculation.is_auto,
    )
    tables: list[BlockTable | None] = [None] * max_num_seqs
    layout: RowLayout = ExactLayout(tables)
    if static:
        layout = PaddedLayout(ops, state.block_tables, allocator.block_size)

    def cache_of(layout: CacheLayout, places: Sequence[LayerPlace]) -> PagedKVCache:
        num_slots = allocator.num_blocks * allocator.block_size
        memory = num_slots, weight.dtype, weight.device
        return PagedKVCache(layout, *memory, places, groups.num_planes)

    cache = cache_of(target.cache_layout, groups.target)
    drafting, reach = None, max_model_len
    if drafter is not None and drafter.max_positions is not None:
        reach = drafter.max_positions
    if drafter is not None and drafter.cache_layout is not None:
        own = drafter.cache_layout, groups.drafter
        draft_cache = cache_of(*own) if groups.num_planes is None else cache.shared_with(*own)
        drafting = Drafting(cast(NetworkDrafter, drafter), PagedModel(draft_cache, reach - 1))
    model = PagedModel(cache, target.config.max_position_embeddings - 1)
    rows_per_depth = speculation.rows_per_depth if speculation else 1
    models = StepModels(
        target, model, drafting, reach + 1, state, ops, layout, allocator.block_size, rows_per_depth
    )
    return Runner(models, tables, static=static)


def make_budget(
    speculation: Speculation | None, runner: Runner, max_rows: int
) -> DraftBudget | None:
    """None where every step verifies as many drafts as requests ask for."""
    if speculation is None or not speculation.is_auto:
        return None
    state, target = runner.models.state, runner.models.target
    depth, size = speculation.num_speculative_tokens, speculation.num_draft_nodes
    free_rows = FREE_ROWS["cuda" if runner.device.type == "cuda" else "cpu"]

    def nodes(slots: Column) -> DraftNodes:
        assert state.draft_scores is not None
        assert state.trees is not None
        places = torch.from_numpy(slots)
        scores = state.draft_scores[places].double()
        is_there = torch.arange(scores.shape[1]) < state.num_drafts[places, None]
        scores = scores.masked_fill(~is_there, -torch.inf)
        return DraftNodes(scores.numpy(), state.trees.depths[places, 1:].numpy())

    read_cost = speculation.drafter.weights_per_row / target.config.weights_per_row
    if size is not None and not runner.static:
        return NodeBudget(
            depth,
            size,
            free_rows=free_rows,
            max_rows=max_rows,
            nodes=nodes,
            depth_cost=speculation.drafter.weights_per_depth / target.weights_per_row,
            read_cost=read_cost,
        )
    return DraftBudget(
        depth,
        size,
        free_rows=free_rows,
        max_rows=max_rows,
        pad=partial(padded, sizes=BATCH_SIZES) if runner.static else None,
        depth_is_free=runner.models.drafting is None,
        read_cost=read_cost,
    )


def _max_drafts(speculation: Speculation | None) -> int:
    """Draft tokens that a slot has room for."""
    if speculation is None:
        return 0
    if speculation.num_draft_nodes is not None:
        return speculation.num_draft_nodes
    return min(speculation.drafter.max_speculative_tokens, MAX_SPECULATIVE_TOKENS)


def drafts_per_step(speculation: Speculation | None) -> tuple[int, int]:
    """Of one request, in rows of either cache: as a rule, and at most."""
    if speculation is None:
        return 0, 0
    usual, deepest = speculation.num_speculative_tokens, speculation.drafter.max_tree_depth
    if speculation.num_draft_nodes is None:
        deepest = min(speculation.drafter.max_speculative_tokens, MAX_SPECULATIVE_TOKENS)
    rows = [
        max(
            depth,
            speculation.num_draft_nodes or 0,
            num_draft_rows(depth, speculation.rows_per_depth),
        )
        for depth in (usual, max(usual, deepest))
    ]
    return rows[0], rows[1]


def draft_probs_shape(
    speculation: Speculation | None, target: TargetModel
) -> tuple[int, int] | None:
    """What the state keeps per slot of the distributions that drafts were drawn from."""
    if speculation is None or speculation.verification != "rejection":
        return None
    return speculation.num_speculative_tokens, target.config.vocab_size
