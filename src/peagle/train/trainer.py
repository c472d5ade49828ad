"""One optimiser step: target features, segments forward and backward, clip, update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peagle.kernels.cpu.linear import unpacked
from peagle.teacher_forcing.draft_model import DraftModel, autocast
from peagle.teacher_forcing.features import Features, FeatureSource
from peagle.teacher_forcing.partition import Segment
from peagle.train.distributed import add_up, exchange, missing_passes, total, whole, world_size
from peagle.train.losses import ChunkedLoss, Rollouts, Tables, Truth
from peagle.train.optimizer import set_learning_rate
from peagle.train.planner import PlannedRow


class Metrics(NamedTuple):
    """Means over the steps since the last call; per depth: does the draft's argmax match."""

    steps: int
    tokens: int
    loss_rows: float  # rows that the loss counts
    num_cut: int  # elements that were drawn and had no room in the padded shapes
    loss: float
    gradient_norm: float
    accuracy: list[float]

    @property
    def cut_share(self) -> float:
        return self.num_cut / max(self.num_cut + self.loss_rows, 1.0)


class Trainer:
    def __init__(
        self,
        model: DraftModel,
        module: nn.Module,  # the model, or what distributes it
        source: FeatureSource,
        target_table: Tensor,  # [V, H]
        losses: ChunkedLoss,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float,
        dtype: torch.dtype | None,  # of autocast; None: the weights' own
    ) -> None:
        self.model, self.module = model, module
        self.source, self.losses, self.optimizer = source, losses, optimizer
        network = model.network
        ids = network.target_ids
        self.target_table = target_table[ids] if network.config.reduced_vocabulary else target_table
        self.max_grad_norm = max_grad_norm
        self.device = network.fc.weight.device
        self.autocast = autocast(self.device, dtype)
        self.table_dtype = dtype
        self._reset(len_depths=network.config.max_speculative_tokens)

    def step(self, rows: Sequence[PlannedRow], learning_rate: float) -> None:
        denominator = max(total(sum(r.weight for r in rows), self.device), 1.0)
        idle = self._idle_segments(rows)
        for planned in rows:
            features = self.source(planned.row, planned.fetched)
            before = idle if planned is rows[-1] else []
            for segment in (*before, *planned.segments):
                is_last = segment is rows[-1].segments[-1]
                with exchange(self.module, now=is_last):
                    self._segment(segment.to(self.device), features, denominator)
            self._tokens += sum_of_documents(planned)
            self._cut += planned.num_cut
        norm = whole(nn.utils.clip_grad_norm_(self._parameters(), self.max_grad_norm))
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._norm += norm.detach()
        self._steps += 1

    def _idle_segments(self, rows: Sequence[PlannedRow]) -> list[Segment]:
        """Passes without loss rows, so that all processes have as many."""
        own = sum(len(planned.segments) for planned in rows)
        last = rows[-1].segments[-1]
        nothing = last._replace(weights=torch.zeros_like(last.weights))
        return [nothing] * missing_passes(self.module, own, self.device)

    def _segment(self, segment: Segment, features: Features, denominator: float) -> None:
        """Forward and backward of one segment; gradients add up over segments and rows."""
        with self.autocast():
            drafted = self.module(segment, features)
        table = unpacked(drafted.table)
        if self.table_dtype is not None:
            table = table.to(self.table_dtype)
        tables = Tables(table, self.target_table)
        truth = Truth(features.states, segment.slots, segment.labels)
        weights = segment.weights.to(self.loss_sum.dtype) / denominator
        rollouts = Rollouts(
            segment.elements.anchor[segment.rows].long() - segment.first,
            segment.loss_depth.long(),
            segment.last - segment.first,
            self.model.network.config.max_speculative_tokens,
        )
        output = self.losses(drafted.trained, tables, truth, weights, rollouts)
        # Distributed modules average gradients over the processes; the denominator wants sums.
        torch.autograd.backward(output.loss * world_size())
        self._observe(segment, output.loss.detach(), output.matches)

    def _observe(self, segment: Segment, loss: Tensor, matches: Tensor) -> None:
        """Counts on the device: reading them here would make the GPU wait for Python."""
        depth = segment.loss_depth.long()
        counted = (segment.weights > 0).to(self._matched.dtype)
        self.loss_sum += loss
        self._counted.index_add_(0, depth, counted)
        self._matched.index_add_(0, depth, counted * matches)

    def take_metrics(self) -> Metrics:
        steps = max(self._steps, 1)
        for counter in (self.loss_sum, self._counted, self._matched):
            add_up(counter)
        accuracy = self._matched / self._counted.clamp(min=1)
        metrics = Metrics(
            steps=self._steps,
            tokens=round(total(self._tokens, self.device)),
            loss_rows=float(self._counted.sum()),
            num_cut=round(total(self._cut, self.device)),
            loss=float(self.loss_sum) / steps,
            gradient_norm=float(self._norm) / steps,
            accuracy=[round(x, 4) for x in accuracy.tolist()],
        )
        self._reset(len(self._counted))
        return metrics

    def _reset(self, len_depths: int) -> None:
        dtype = torch.float64 if self.target_table.dtype == torch.float64 else torch.float32
        self.loss_sum = torch.zeros((), device=self.device, dtype=dtype)
        self._norm = torch.zeros((), device=self.device, dtype=dtype)
        self._counted = torch.zeros(len_depths, device=self.device)
        self._matched = torch.zeros(len_depths, device=self.device)
        self._steps = 0
        self._tokens = 0
        self._cut = 0

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def sum_of_documents(planned: PlannedRow) -> int:
    """Tokens of the packed row that are not padding."""
    return int((planned.row.document < len(planned.row.indices)).sum())
