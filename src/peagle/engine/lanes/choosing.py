"""How a step chooses tokens: the drafts, and what the target makes of them.

Both forms ask the host nothing. Chosen by `choosing`, for the lanes of one step.

Shapes: B lanes, K draft tokens, n rows of each lane, V tokens, Vd of them the drafter's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from peagle.engine.lanes.caches import LaneModels
from peagle.kernels.lane_state import LaneState
from peagle.kernels.plain.choose import Chosen, RowRules
from peagle.kernels.step_ops import StepOps
from peagle.models.output import OutputRows
from peagle.speculation.verify import PADDING

# What the graph has to be able to do for its requests; each includes the one before it.
Sampling = Literal["greedy", "sampled", "filtered"]


class Judged(NamedTuple):
    """What `commit` reads: a draft is kept where it is the token that was chosen."""

    drafts: Tensor  # [B, K]
    chosen: Tensor  # [B, K+1]
    usable: Tensor  # [B, K+1] bool


@dataclass(frozen=True)
class StepRows:
    """The lanes of a step, and the output position [B] that the first row of each decides."""

    state: LaneState
    lanes: Tensor
    outputs: Tensor
    sampling: Sampling

    @property
    def filters(self) -> bool:
        return self.sampling == "filtered"

    def rules(self, per_lane: int, first: int = 0) -> RowRules:
        """Of rows first .. first + n - 1 of each lane, [B * n]."""
        offsets = torch.arange(first, first + per_lane, device=self.outputs.device)
        positions = (self.outputs[:, None] + offsets).flatten()
        lanes, state = self.lanes.repeat_interleave(per_lane), self.state
        return RowRules(
            temperature=state.temperature[lanes],
            top_k=state.top_k[lanes],
            top_p=state.top_p[lanes],
            min_p=state.min_p[lanes],
            seeds=state.seeds[lanes],
            positions=positions,
        )


class Coupled:
    """Drafter and target choose with the noise of the position, or greedily; a draft is kept
    where both chose the same."""

    def __init__(self, ops: StepOps, rows: StepRows) -> None:
        self.ops, self.rows = ops, rows

    def draft(self, output: OutputRows, first_depth: int) -> Tensor:
        """models.lane_drafters.RowsChoose."""
        return self._choose(output, first_depth)[0]

    def judge(self, output: OutputRows, drafts: Tensor) -> Judged:
        """B * (K+1) rows of the target, after each prefix of the drafts."""
        return Judged(drafts, *self._choose(output, 0))

    def _choose(self, output: OutputRows, first: int) -> tuple[Tensor, Tensor]:
        """B * n rows -> tokens and usable [B, n]."""
        per_lane = output.hidden.shape[0] // self.rows.lanes.shape[0]
        if self.rows.sampling == "greedy":
            chosen = self._best(output)
        else:
            chosen = self._draw(output, self.rows.rules(per_lane, first))
        return chosen.token_ids.view(-1, per_lane), chosen.usable.view(-1, per_lane)

    def _best(self, output: OutputRows) -> Chosen:
        if output.chosen_without_logits:
            return self.ops.best_tokens(*output.product(), output.ids)
        return self.ops.choose_tokens(output.logits(), None, output.ids)

    def _draw(self, output: OutputRows, rules: RowRules) -> Chosen:
        filters = self.rows.filters
        return self.ops.choose_tokens(output.logits(), rules, output.ids, filters=filters)


class ByRejection:
    """Keeps the law of every draft, for rejection sampling. Greedy lanes have laws of one token:
    the same rule gives exactly their greedy tokens."""

    def __init__(
        self, ops: StepOps, rows: StepRows, num_drafts: Tensor, depth: int, vocab_size: int
    ) -> None:
        self.ops, self.rows, self.num_drafts = ops, rows, num_drafts
        # Of the step, not kept: graphs of one pool share this memory.
        shape = (rows.lanes.shape[0], depth, vocab_size)
        self._laws = torch.empty(shape, dtype=torch.float32, device=rows.lanes.device)

    def draft(self, output: OutputRows, first_depth: int) -> Tensor:
        """models.lane_drafters.RowsChoose: all K depths at once, or one of them."""
        batch, _, vocab_size = self._laws.shape
        per_lane = output.hidden.shape[0] // batch
        laws = self._laws[:, first_depth : first_depth + per_lane].view(-1, vocab_size)
        rules = self.rows.rules(per_lane, first_depth)
        chosen = self.ops.choose_with_laws(
            output.logits(), rules, output.ids, laws, filters=self.rows.filters
        )
        return chosen.token_ids.view(batch, per_lane)

    def judge(self, output: OutputRows, drafts: Tensor) -> Judged:
        """B * (K+1) rows of the target, after each prefix of the drafts."""
        rows, depth = self.rows, drafts.shape[1]
        rules = rows.rules(depth + 1)
        laws, usable = self.ops.token_laws(output.logits(), rules, filters=rows.filters)
        coins = self.ops.rejection_coins(rows.state.seeds[rows.lanes], rows.outputs, depth)
        laws = laws.view(-1, depth + 1, laws.shape[1])
        verdict = self.ops.verify_rejection(laws, self._laws, drafts, self.num_drafts, *coins)
        # A draft is accepted where a token follows. The others are taken out: where rounding
        # leaves nothing of p - q, the bonus token may be the very draft that was refused.
        accepted = verdict.token_ids[:, 1:] != PADDING
        return Judged(
            torch.where(accepted, drafts, PADDING),
            verdict.token_ids.clamp(min=0),  # what follows is looked up as a token, for nothing
            usable.view(-1, depth + 1),
        )


def choosing(
    models: LaneModels, rows: StepRows, depth: int, num_drafts: Tensor, by_rejection: bool
) -> Coupled | ByRejection:
    if not by_rejection:
        return Coupled(models.ops, rows)
    return ByRejection(models.ops, rows, num_drafts, depth, models.target.config.vocab_size)
