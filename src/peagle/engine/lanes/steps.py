"""One step over lanes as a function of static tensors.

Nothing in here asks the device for a value, and every shape is fixed when the step is made: on a
GPU a step is captured once as a CUDA graph and replayed. Inputs are copied into the step's own
tensors before each run.

Shapes: B lanes, K draft tokens, N = I * Q prefill rows in I items of Q rows.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from peagle.engine.lanes.caches import LaneDrafting, LaneModels
from peagle.kernels.lane_state import LaneState, StepCounts
from peagle.kernels.plain.choose import RowRules
from peagle.models.attention import Attention
from peagle.models.lane_drafters import LaneDraftBatch, PendingRows

PREFILL_ITEM = 16  # rows of a prompt that attend together

# What the graph has to be able to do for its requests; each includes the one before it.
Sampling = Literal["greedy", "sampled", "filtered"]


class DecodeShape(NamedTuple):
    batch: int
    depth: int  # draft tokens per lane; 0: plain decoding
    sampling: Sampling
    num_splits: int


class PrefillShape(NamedTuple):
    num_items: int
    sampling: Sampling


class DecodeStep:
    """draft, verify, commit for the lanes in `inputs`; unused entries name the dummy."""

    def __init__(self, models: LaneModels, shape: DecodeShape) -> None:
        self.models, self.shape = models, shape
        self.inputs = torch.full((shape.batch,), models.state.dummy, device=models.device)

    def __call__(self) -> Tensor:
        """-> the report [B, HEADER + K+1]; see kernels/plain/lanes.py."""
        models, depth = self.models, self.shape.depth
        drafting = models.drafting if depth else None
        reach = drafting.max_draft_tokens if drafting else 0
        counts = models.ops.begin_step(models.state, self.inputs, depth, reach)
        drafts = self._propose(drafting, counts)
        chosen, usable, taps = self._verify(drafts, counts)
        return models.ops.commit(models.state, self.inputs, counts, drafts, chosen, usable, taps)

    def _propose(self, drafting: LaneDrafting | None, counts: StepCounts) -> Tensor:
        """Draft tokens [B, K]."""
        if drafting is None:
            return self.inputs.new_empty(self.shape.batch, 0)
        state, lanes, depth = self.models.state, self.inputs, self.shape.depth
        pending = PendingRows(
            tokens=state.pending_tokens[lanes, : depth + 1],
            taps=state.pending_taps[lanes, : depth + 1],
            starts=counts.draft_starts,
            num_pending=counts.num_pending,
            num_rows=counts.num_draft_rows,
        )

        def attend(starts: Tensor, counts: Tensor, rows_per_lane: int) -> tuple[Attention, Tensor]:
            return drafting.model.attention(
                self.models.ops,
                state.block_tables,
                lanes,
                starts,
                counts,
                rows_per_lane,
                self.shape.num_splits,
            )

        def choose(logits: Tensor, first_depth: int, ids: Tensor | None) -> Tensor:
            per_lane = logits.shape[0] // self.shape.batch
            chosen, _ = self._choose(logits, counts.num_outputs + first_depth, per_lane, ids)
            return chosen

        batch = LaneDraftBatch(pending, depth, attend, choose, self.models.ops)
        return drafting.drafter.propose(batch)

    def _verify(self, drafts: Tensor, counts: StepCounts) -> tuple[Tensor, Tensor, Tensor | None]:
        """The target's choices [B, K+1], whether there were any, and the taps [B, K+1, C]."""
        models, state, lanes = self.models, self.models.state, self.inputs
        rows = self.shape.depth + 1
        tokens = torch.cat((state.last_tokens[lanes, None], drafts), dim=1)
        attention, positions = models.model.attention(
            models.ops,
            state.block_tables,
            lanes,
            counts.num_computed,
            counts.num_verify_rows,
            rows,
            self.shape.num_splits,
        )
        tap_layers = models.tap_layers
        hidden, taps = models.target(tokens.flatten(), positions, attention, tap_layers)
        logits = models.target.logits(hidden)
        chosen, usable = self._choose(logits, counts.num_outputs, rows, None)
        return chosen, usable, None if taps is None else taps.unflatten(0, (-1, rows))

    def _choose(
        self, logits: Tensor, outputs: Tensor, per_lane: int, ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[B * n, V] -> tokens and usable [B, n]; row j of a lane is output `outputs` + j."""
        rules = None
        if self.shape.sampling != "greedy":
            offsets = torch.arange(per_lane, device=outputs.device)
            positions = (outputs[:, None] + offsets).flatten()
            lanes = self.inputs.repeat_interleave(per_lane)
            rules = row_rules(self.models.state, lanes, positions)
        with_filters = self.shape.sampling == "filtered"
        chosen = self.models.ops.choose_tokens(logits, rules, ids, filters=with_filters)
        return chosen.token_ids.view(-1, per_lane), chosen.usable.view(-1, per_lane)


class PrefillInputs(NamedTuple):
    """One chunk of prompts. A prompt's rows fill whole items; the last may hold fewer."""

    token_ids: Tensor  # [N]
    next_ids: Tensor  # [N] the token after each, where it is known: what the drafter reads
    lanes: Tensor  # [I] of each item
    starts: Tensor  # [I]
    counts: Tensor  # [I] rows that are real
    draft_counts: Tensor  # [I] those whose next token is known
    final_rows: Tensor  # [I] the last rows of prompts that end in this chunk, in any order
    final_lanes: Tensor  # [I] their lanes; the dummy where there is none
    final_lengths: Tensor  # [I] how many tokens those prompts have


def empty_prefill(
    num_items: int, dummy_lane: int, device: torch.device | None = None
) -> tuple[Tensor, PrefillInputs]:
    """One int64 tensor, so that one copy brings everything, and its fields: nobody's rows yet."""
    rows = num_items * PREFILL_ITEM
    per_row, per_item = 2, len(PrefillInputs._fields) - 2
    sizes = [rows] * per_row + [num_items] * per_item
    packed = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    fields = PrefillInputs(*torch.split(packed, sizes))
    fields.lanes.fill_(dummy_lane)
    fields.final_lanes.fill_(dummy_lane)
    return packed, fields


class PrefillStep:
    """Computes prompt rows; where a prompt ends, chooses its first token and opens its lane."""

    def __init__(self, models: LaneModels, shape: PrefillShape) -> None:
        self.models, self.shape = models, shape
        self.inputs, self.fields = empty_prefill(shape.num_items, models.state.dummy, models.device)

    def __call__(self) -> Tensor:
        """-> [I, 2]: the first token of the prompt that ends there, and whether it failed."""
        models, fields = self.models, self.fields
        attention, positions = models.model.attention(
            models.ops,
            models.state.block_tables,
            fields.lanes,
            fields.starts,
            fields.counts,
            PREFILL_ITEM,
            1,
        )
        hidden, taps = models.target(fields.token_ids, positions, attention, models.tap_layers)
        self._feed_drafter(taps)
        logits = models.target.logits(hidden.index_select(0, fields.final_rows))
        return self._open_lanes(logits, taps)

    def _feed_drafter(self, taps: Tensor | None) -> None:
        drafting, fields = self.models.drafting, self.fields
        if drafting is None:
            return
        assert taps is not None
        attention, positions = drafting.model.attention(
            self.models.ops,
            self.models.state.block_tables,
            fields.lanes,
            fields.starts,
            fields.draft_counts,
            PREFILL_ITEM,
            1,
        )
        drafting.drafter.feed(fields.next_ids, taps, positions, attention)

    def _open_lanes(self, logits: Tensor, taps: Tensor | None) -> Tensor:
        state, fields = self.models.state, self.fields
        lanes, lengths = fields.final_lanes, fields.final_lengths
        rules = None
        if self.shape.sampling != "greedy":
            rules = row_rules(state, lanes, lengths - state.num_prompt[lanes])
        with_filters = self.shape.sampling == "filtered"
        tokens, usable = self.models.ops.choose_tokens(logits, rules, None, filters=with_filters)
        state.last_tokens[lanes] = tokens
        state.num_computed[lanes] = lengths
        state.limits[lanes] = torch.where(usable, state.limits[lanes], 0)
        if taps is not None:
            state.draft_starts[lanes] = (lengths - 1).clamp(min=0)  # the dummy's length is 0
            state.pending_tokens[lanes, 0] = tokens
            state.pending_taps[lanes, 0] = taps.index_select(0, fields.final_rows)
        return torch.stack((tokens, (~usable).long()), dim=1)


def row_rules(state: LaneState, lanes: Tensor, positions: Tensor) -> RowRules:
    """How each row is sampled, given its lane and its output position."""
    return RowRules(
        temperature=state.temperature[lanes],
        top_k=state.top_k[lanes],
        top_p=state.top_p[lanes],
        min_p=state.min_p[lanes],
        seeds=state.seeds[lanes],
        positions=positions,
    )
