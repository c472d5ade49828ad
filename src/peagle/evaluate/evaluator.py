"""Acceptance length for every K in one teacher-forced pass over the target's own text.

For each anchor the drafter proposes K tokens as if it started there; how many of them, from the
first on, the target wrote is all that greedy verification would have found. A replay of the text
then visits the anchors that the engine would visit under each K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from peagle.data.dataset import Dataset
from peagle.data.packing import PackedRow, assign, pack
from peagle.evaluate.replay import Limits, replay, run_lengths, steps
from peagle.kernels.cpu.linear import Weight
from peagle.models.eagle import EagleNetwork
from peagle.models.layers import linear
from peagle.progress import track
from peagle.speculation.looping import is_looping
from peagle.speculation.statistics import SpecDecodeStats
from peagle.speculation.trees import BEAM
from peagle.teacher_forcing.draft_model import DraftModel
from peagle.teacher_forcing.features import Features, FeatureSource
from peagle.teacher_forcing.partition import (
    UNPADDED,
    Segment,
    Shapes,
    boundaries_under,
    build_segments,
    supervised_runs,
    unrolled_segment,
)

MOST_RECALLED = 16  # best tokens of a depth among which the right one is looked for


class Acceptance(Protocol):
    """What counted and expected statistics have in common."""

    @property
    def mean_acceptance_length(self) -> float: ...

    @property
    def per_position_acceptance(self) -> list[float]: ...

    @property
    def conditional_acceptance(self) -> list[float]: ...


class Mergeable(Protocol):
    def merge(self, other: Self) -> None: ...


class MergeableAcceptance(Acceptance, Mergeable, Protocol): ...


_Counts = TypeVar("_Counts", bound=Mergeable)
_Stats = TypeVar("_Stats", bound=MergeableAcceptance)


@dataclass(frozen=True)
class Evaluation:
    """One entry per K; groups are `all`, `not_looping` and the categories."""

    max_tokens: int
    groups: Mapping[str, Sequence[Acceptance]]
    num_documents: Mapping[str, int]

    def acceptance_length(self, num_speculative_tokens: int, group: str = "all") -> float:
        k = min(num_speculative_tokens, self.max_tokens)
        return self.groups[group][k - 1].mean_acceptance_length

    def as_dict(self) -> dict[str, Any]:
        return {name: self._group(name) for name in self.groups}

    def _group(self, name: str) -> dict[str, Any]:
        stats = self.groups[name]
        return {
            "documents": self.num_documents[name],
            "acceptance_length": [round(s.mean_acceptance_length, 4) for s in stats],
            "per_position_acceptance": [round(x, 4) for x in stats[-1].per_position_acceptance],
            "conditional_acceptance": [round(x, 4) for x in stats[-1].conditional_acceptance],
        }


class Drafted(NamedTuple):
    """What the drafter computed at C elements, and what the target wrote there."""

    normed: Tensor  # [C, H]: the drafter's states after its final norm
    table: Weight  # [Vd, H]
    target_ids: Tensor  # [Vd]
    states: Tensor  # [n, H]: the target's
    slots: Tensor  # [C]: the state that each token was chosen from
    labels: Tensor  # [C]: those tokens
    corrected: Tensor | None  # [C, H]: `normed` behind the tokens that the target wrote


# -> [J, C]: the probability that each draft is accepted, by each of J verifications.
AcceptanceRule = Callable[[Drafted], Tensor]


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
        return self.replayed(
            (d, leading(d.chances[0])) for d in self.documents(model, greedy_acceptance)
        )

    def replayed(self, documents: Iterable[tuple[Document, Sequence[int]]]) -> Evaluation:
        """`documents`: each with the drafts [n] that are right in a row at each anchor."""
        ks = range(1, self.max_tokens + 1)
        counted = [
            (document.groups, [replay(document.mask, right, k, document.limits) for k in ks])
            for document, right in documents
        ]
        return summed(counted, self.max_tokens, SpecDecodeStats)

    def documents(self, model: DraftModel, rule: AcceptanceRule) -> Iterator[Document]:
        return self.documents_of(model, lambda row: self._chances(model, row, rule))

    @torch.no_grad()
    def documents_of(
        self, model: DraftModel, chances_of: Callable[[PackedRow], Tensor], room: int = 0
    ) -> Iterator[Document]:
        """`chances_of` a packed row are [J, n, ...]; `room`: slots behind its last document."""
        with track("evaluating", sum(map(len, self.rows)), "rows") as work:
            for indices in self.rows:
                row = pack(self.dataset, indices, self.tokens_per_row + room)
                chances = chances_of(row)
                for number, index in enumerate(indices):
                    here = row.document == number
                    tokens, mask = row.token_ids[here], row.loss_mask[here]
                    groups = self._groups(index, tokens[mask].tolist())
                    limits = self._limits(model, index, mask.tolist())
                    yield Document(groups, mask.tolist(), limits, chances[:, here])
                    work.advance()

    def _chances(self, model: DraftModel, row: PackedRow, rule: AcceptanceRule) -> Tensor:
        """[J, n, K]"""
        features = self.source(row, self.source.fetch(row))
        chances = torch.zeros(1, len(row.token_ids), self.max_tokens, dtype=torch.double)
        counts = supervised_runs(row).clamp(max=self.max_tokens)
        for segment in self.segments_of(model.network, row, counts):
            here = segment.to(features.aux_hidden_states.device)
            with self.autocast():
                drafted = self._drafted(model, here, features)
                found = self._in_chunks(rule, drafted)
            if len(chances) < len(found):
                chances = chances.repeat(len(found), 1, 1)
            real = segment.weights > 0  # the others are padding
            anchor = segment.elements.anchor[segment.rows].long()[real]
            chances[:, anchor, segment.loss_depth.long()[real]] = found.cpu()[:, real]
        return chances

    def _drafted(self, model: DraftModel, segment: Segment, features: Features) -> Drafted:
        output = model(segment, features)
        return Drafted(
            output.states,
            output.table,
            model.network.target_ids,
            features.states,
            segment.slots,
            segment.labels,
            output.corrected,
        )

    def _in_chunks(self, rule: AcceptanceRule, drafted: Drafted) -> Tensor:
        """Applies the rule in chunks: logits of all elements at once would be the pass's largest
        tensor."""
        parts = []
        for start in range(0, len(drafted.labels), self.chunk_rows):
            part = slice(start, start + self.chunk_rows)
            here = drafted._replace(
                normed=drafted.normed[part],
                slots=drafted.slots[part],
                labels=drafted.labels[part],
                corrected=None if drafted.corrected is None else drafted.corrected[part],
            )
            parts.append(rule(here).double())
        return torch.cat(parts, dim=1) if parts else torch.zeros(1, 0, dtype=torch.double)

    def segments_of(self, network: EagleNetwork, row: PackedRow, counts: Tensor) -> list[Segment]:
        """With so many drafts [n] at each anchor."""
        weights = torch.ones(self.max_tokens)
        if network.config.method == "eagle3":
            segments = [unrolled_segment(row, counts, weights, self.shapes)]
        else:
            reach = network.config.reach
            boundaries = boundaries_under(row, counts, self.max_rows, reach)
            segments = build_segments(row, counts, boundaries, weights, self.shapes, reach)
        last = network.config.max_position_embeddings - 1  # beyond it nothing is drafted
        return [s._replace(positions=s.positions.clamp(max=last)) for s in segments]

    def draft_counts(self, model: DraftModel, row: PackedRow) -> Tensor:
        """[n]: how many drafts an engine asks for at each anchor; 0 where no step starts."""
        counts = torch.zeros(len(row.token_ids), dtype=torch.long)
        for number, index in enumerate(row.indices):
            here = torch.nonzero(row.document == number).flatten()
            mask = row.loss_mask[here].tolist()
            for step in steps(mask, self.max_tokens, self._limits(model, index, mask)):
                if step is not None:
                    counts[here[step.newest - 1]] = step.num_drafts
        return counts

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


def leading(is_right: Tensor) -> list[int]:
    """[n, K] -> [n]: right drafts in a row, from the first on."""
    counts: list[int] = is_right.long().cumprod(1).sum(1).tolist()
    return counts


def greedy_acceptance(drafted: Drafted) -> Tensor:
    """[1, C]: is the drafter's best token the one that the target wrote?

    A correction chooses among the candidates that the engine shows it.
    """
    logits = linear(drafted.normed, drafted.table)
    return _best_is_right(drafted, logits)[None]


def ranked_acceptance(drafted: Drafted) -> Tensor:
    """[2, C]: the same, and 1 over the place that the target's token has among the MOST_RECALLED
    best of the pass, which no correction has changed; 0 if it is not among them."""
    logits = linear(drafted.normed, drafted.table)
    best = logits.topk(min(MOST_RECALLED, logits.shape[1])).indices  # [C, M]
    is_label = drafted.target_ids[best] == drafted.labels[:, None]
    places = torch.arange(1, best.shape[1] + 1, device=best.device)
    return torch.stack((_best_is_right(drafted, logits).double(), (is_label / places).sum(1)))


def _best_is_right(drafted: Drafted, logits: Tensor) -> Tensor:
    if drafted.corrected is None:
        best = logits.argmax(-1)
    else:
        candidates = logits.topk(BEAM).indices
        scores = linear(drafted.corrected, drafted.table).gather(1, candidates)
        best = candidates.gather(1, scores.argmax(1, keepdim=True))[:, 0]
    return drafted.target_ids[best] == drafted.labels


def summed(
    documents: Sequence[tuple[Sequence[str], Sequence[_Stats]]],
    max_tokens: int,
    zero: Callable[[], _Stats],
) -> Evaluation:
    """Adds up documents, each with the groups it belongs to and its statistics for every K."""
    counts = Counter(name for names, _ in documents for name in names)
    return Evaluation(max_tokens, totals(documents, max_tokens, zero), {"all": 0, **counts})


def totals(
    documents: Iterable[tuple[Sequence[str], Sequence[_Counts]]],
    size: int,
    zero: Callable[[], _Counts],
) -> dict[str, list[_Counts]]:
    """By group: `size` statistics, each summed over the group's documents."""
    groups: dict[str, list[_Counts]] = {"all": [zero() for _ in range(size)]}
    for names, stats in documents:
        for name in names:
            group = groups.setdefault(name, [zero() for _ in range(size)])
            for total, one in zip(group, stats, strict=True):
                total.merge(one)
    return groups
