"""Acceptance length for every K in one teacher-forced pass over the target's own text.

For each anchor the drafter says K tokens as if it started there; how many of them, from the
first on, the target wrote is all that greedy verification would have found. A walk over the text
then visits the anchors that the engine would visit under each K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.data.dataset import Dataset
from peagle.data.packing import PackedRow, assign, pack
from peagle.speculation.looping import is_looping
from peagle.speculation.statistics import SpecDecodeStats
from peagle.train.cod import supervised_runs
from peagle.train.evaluation import Evaluation, summed
from peagle.train.features import FeatureSource
from peagle.train.objective import DraftModel, Eagle3Planner
from peagle.train.partition import Segment, boundaries_under
from peagle.train.segments import UNPADDED, Shapes, build_segments
from peagle.train.walks import Limits, run_lengths, walk


class Drafted(NamedTuple):
    """What the drafter would say at C elements, and what the target said there."""

    normed: Tensor  # [C, H]: the drafter's states after its final norm
    table: Tensor  # [Vd, H]
    target_ids: Tensor  # [Vd]
    states: Tensor  # [n, H]: the target's
    slots: Tensor  # [C]: the state that each token was chosen from
    labels: Tensor  # [C]: those tokens


# -> [J, C]: J ways to judge, each a chance of acceptance.
Judge = Callable[[Drafted], Tensor]


class Document(NamedTuple):
    groups: list[str]
    mask: list[bool]  # [n]
    limits: Limits
    chances: Tensor  # [J, n, K] of the draft at (anchor, depth), given all before it were right


class Evaluator:
    """Evaluates a head on rows of a dataset. `max_rows` bounds the rows of one forward pass."""

    def __init__(
        self,
        dataset: Dataset,
        indices: list[int],
        source: FeatureSource,
        max_tokens: int,
        *,
        tokens_per_row: int,
        max_rows: int,
        shapes: Shapes = UNPADDED,
        chunk_rows: int = 4096,
        max_model_len: int | None = None,
        autocast: Callable[[], Any],
    ) -> None:
        self.dataset, self.source, self.max_tokens = dataset, source, max_tokens
        lengths = dataset.lengths[indices].tolist()
        self.rows = [[indices[i] for i in items] for items in assign(lengths, tokens_per_row)]
        self.tokens_per_row, self.max_rows, self.shapes = tokens_per_row, max_rows, shapes
        self.chunk_rows, self.max_model_len, self.autocast = chunk_rows, max_model_len, autocast

    def __call__(self, model: DraftModel) -> Evaluation:
        """Greedy drafts: those that are the target's own tokens are kept."""
        counted = [(d.groups, self._walks(d)) for d in self.documents(model, says_the_same)]
        return summed(counted, self.max_tokens, SpecDecodeStats)

    def _walks(self, document: Document) -> list[SpecDecodeStats]:
        leading = document.chances[0].long().cumprod(1).sum(1).tolist()
        ks = range(1, self.max_tokens + 1)
        return [walk(document.mask, leading, k, document.limits) for k in ks]

    @torch.no_grad()
    def documents(self, model: DraftModel, judge: Judge) -> Iterator[Document]:
        for indices in self.rows:
            row = pack(self.dataset, indices, self.tokens_per_row)
            chances = self._chances(model, row, judge)
            for number, index in enumerate(indices):
                here = row.document == number
                tokens, mask = row.token_ids[here], row.loss_mask[here]
                groups = self._groups(index, tokens[mask].tolist())
                limits = self._limits(model, index, mask.tolist())
                yield Document(groups, mask.tolist(), limits, chances[:, here])

    def _chances(self, model: DraftModel, row: PackedRow, judge: Judge) -> Tensor:
        """[J, n, K]"""
        features = self.source(row, self.source.fetch(row))
        chances = torch.zeros(1, len(row.token_ids), self.max_tokens, dtype=torch.double)
        last = model.network.config.max_position_embeddings - 1  # beyond it nothing is drafted
        for segment in self._segments(model, row):
            here = segment.to(features.aux_hidden_states.device)
            here = here._replace(positions=here.positions.clamp(max=last))
            with self.autocast():
                normed, table = model(here, features)
                ids, states = model.network.target_ids, features.states
                drafted = Drafted(normed, table, ids, states, here.slots, here.labels)
                judged = self._judge(judge, drafted)
            if len(chances) < len(judged):
                chances = chances.repeat(len(judged), 1, 1)
            real = segment.weights > 0  # the others are padding
            anchor = segment.elements.anchor[segment.rows].long()[real]
            chances[:, anchor, segment.charged_depth.long()[real]] = judged.cpu()[:, real]
        return chances

    def _judge(self, judge: Judge, drafted: Drafted) -> Tensor:
        """In chunks: logits of all elements at once would be the largest tensor of the pass."""
        judged = []
        for start in range(0, len(drafted.labels), self.chunk_rows):
            part = slice(start, start + self.chunk_rows)
            here = drafted._replace(
                normed=drafted.normed[part],
                slots=drafted.slots[part],
                labels=drafted.labels[part],
            )
            judged.append(judge(here).double())
        return torch.cat(judged, dim=1) if judged else torch.zeros(1, 0, dtype=torch.double)

    def _segments(self, model: DraftModel, row: PackedRow) -> list[Segment]:
        weights = torch.ones(self.max_tokens)
        if model.network.config.method == "eagle3":
            planner = Eagle3Planner(weights.double(), weights, shapes=self.shapes)
            return planner(row, torch.Generator().manual_seed(0)).segments
        counts = supervised_runs(row).clamp(max=self.max_tokens)
        boundaries = boundaries_under(row, counts, self.max_rows)
        return build_segments(row, counts, boundaries, weights, self.shapes)

    def _groups(self, index: int, answer: list[int]) -> list[str]:
        names = ["all"] if is_looping(answer) else ["all", "not_looping"]
        category = self.dataset.info[index]["category"]
        return [*names, f"category:{category}"] if category else names

    def _limits(self, model: DraftModel, index: int, mask: list[bool]) -> Limits:
        """What the engine knew when it wrote the text."""
        max_tokens = self.dataset.manifest["made_by"].get("max_tokens")
        if max_tokens is None and self.dataset.info[index]["clipped"]:
            max_tokens = max(run_lengths(mask))
        positions = model.network.config.max_position_embeddings
        return Limits(max_tokens, self.max_model_len, positions)


def says_the_same(drafted: Drafted) -> Tensor:
    """[1, C]: is the drafter's best token the one that the target said?"""
    said = F.linear(drafted.normed, drafted.table).argmax(-1)
    return (drafted.target_ids[said] == drafted.labels)[None]
