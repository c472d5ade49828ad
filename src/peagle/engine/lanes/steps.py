"""One step over lanes as a function of static tensors.

Nothing in here asks the device for a value, and every shape is fixed when the step is made: on a
GPU a step is captured once as a CUDA graph and replayed. Inputs are copied into the step's own
tensors before each run.

Shapes: B lanes, K draft tokens, N = I * Q prefill rows in I items of Q rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.lanes.caches import LaneDrafting, LaneModels
from peagle.engine.lanes.choosing import ByRejection, Coupled, Sampling, StepRows, choosing
from peagle.kernels.lane_state import StepCounts
from peagle.models.attention import Attention
from peagle.models.lane_drafters import LaneDraftBatch, PendingRows, RowsChoose
from peagle.models.output import OutputRows

PREFILL_ITEM = 16  # rows of a prompt that attend together


class DecodeShape(NamedTuple):
    batch: int
    depth: int  # draft tokens per lane; 0: plain decoding
    sampling: Sampling
    num_splits: int
    by_rejection: bool = False  # how sampled lanes verify their drafts


class PrefillShape(NamedTuple):
    num_items: int
    sampling: Sampling
    by_rejection: bool = False


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
        choice = self._choosing(counts)
        drafts = self._propose(drafting, counts, choice.draft)
        output, taps = self._verify(drafts, counts)
        judged = choice.judge(output, drafts)
        return models.ops.commit(models.state, self.inputs, counts, *judged, taps)

    def _choosing(self, counts: StepCounts) -> Coupled | ByRejection:
        shape = self.shape
        rows = StepRows(self.models.state, self.inputs, counts.num_outputs, shape.sampling)
        return choosing(self.models, rows, shape.depth, counts.num_drafts, shape.by_rejection)

    def _propose(
        self, drafting: LaneDrafting | None, counts: StepCounts, choose: RowsChoose
    ) -> Tensor:
        """Draft tokens [B, K]."""
        if drafting is None:
            return self.inputs.new_empty(self.shape.batch, 0)
        state, lanes, depth = self.models.state, self.inputs, self.shape.depth
        width = counts.pending_tokens.shape[1]
        pending = PendingRows(
            tokens=counts.pending_tokens,
            taps=self.models.ops.gather_taps(state.pending_taps, lanes, width),
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

        batch = LaneDraftBatch(pending, depth, attend, choose, self.models.ops)
        return drafting.drafter.propose(batch)

    def _verify(self, drafts: Tensor, counts: StepCounts) -> tuple[OutputRows, Tensor | None]:
        """The target's B * (K+1) rows, one after each prefix, and the taps [B, K+1, C]."""
        models, state, lanes = self.models, self.models.state, self.inputs
        rows = self.shape.depth + 1
        table = models.target.embed_tokens.weight
        attention, positions = models.model.attention(
            models.ops,
            state.block_tables,
            lanes,
            counts.num_computed,
            counts.num_verify_rows,
            rows,
            self.shape.num_splits,
        )
        embeddings = models.ops.embed_tokens(table, counts.last_tokens, drafts)
        hidden, taps = models.target.run(embeddings, positions, attention, models.tap_layers)
        output = OutputRows(hidden, models.target)
        return output, None if taps is None else taps.view(-1, rows, taps.shape[1])


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
    # [len(SETTINGS) * I] what their requests ask for, for the columns of LaneState that SETTINGS
    # names; FRACTIONS as the bits of float32.
    final_settings: Tensor


WHOLE_NUMBERS = ("limits", "num_prompt", "wanted_drafts", "top_k", "seeds")
FRACTIONS = ("temperature", "top_p", "min_p")
SETTINGS = WHOLE_NUMBERS + FRACTIONS


def empty_prefill(
    num_items: int, dummy_lane: int, device: torch.device | None = None
) -> tuple[Tensor, PrefillInputs]:
    """One int64 tensor, so that one copy brings everything, and its fields: nobody's rows yet."""
    rows = num_items * PREFILL_ITEM
    per_row, per_item = 2, len(PrefillInputs._fields) - 3
    sizes = [rows] * per_row + [num_items] * per_item + [num_items * len(SETTINGS)]
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
        self._take_settings()
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
        output = OutputRows(hidden.index_select(0, fields.final_rows), models.target)
        return self._open_lanes(output, taps)

    def _take_settings(self) -> None:
        """In the step and not when the lane is taken: a request costs the host no launches."""
        state, lanes = self.models.state, self.fields.final_lanes
        settings = self.fields.final_settings.view(len(SETTINGS), -1)
        for name, values in zip(SETTINGS, settings, strict=True):
            is_fraction = name in FRACTIONS
            column = values.int().view(torch.float32) if is_fraction else values
            getattr(state, name)[lanes] = column

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

    def _open_lanes(self, output: OutputRows, taps: Tensor | None) -> Tensor:
        state, fields = self.models.state, self.fields
        lanes, lengths = fields.final_lanes, fields.final_lengths
        rows = StepRows(state, lanes, lengths - state.num_prompt[lanes], self.shape.sampling)
        none = torch.zeros_like(lanes)
        choice = choosing(self.models, rows, 0, none, self.shape.by_rejection)
        judged = choice.judge(output, lanes.new_empty(len(lanes), 0))
        tokens, usable = judged.chosen[:, 0], judged.usable[:, 0]
        state.last_tokens[lanes] = tokens
        state.num_computed[lanes] = lengths
        state.limits[lanes] = torch.where(usable, state.limits[lanes], 0)
        if taps is not None:
            state.draft_starts[lanes] = (lengths - 1).clamp(min=0)  # the dummy's length is 0
            state.pending_tokens[lanes, 0] = tokens
            state.pending_taps[lanes, 0] = taps.index_select(0, fields.final_rows)
        return torch.stack((tokens, (~usable).long()), dim=1)
