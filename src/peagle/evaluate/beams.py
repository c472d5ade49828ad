"""The lattices that an EAGLE-3 drafter gives at anchors of a packed row.

They need a pass for each depth, over the rows of a beam, and the drafter that serves runs these:
each anchor is a slot of its batch. The prefixes, which requests have in their caches, are real
rows of the text. They are computed once, and all anchors see them where they lie.

Shapes: n slots of a packed row, A anchors, K depths, M paths of a beam. In attention Q new rows of
each anchor, W of them and of the passes before, T real rows that any of them sees, g key-value
heads for r heads each, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.data.packing import PackedRow
from peagle.evaluate.evaluator import Evaluator
from peagle.kernels.reference.attention import PLAIN, Scores
from peagle.kernels.reference.trees import Candidates
from peagle.kernels.step_ops import step_ops
from peagle.models.drafter import DraftBatch, Packing, RowItems, Rows
from peagle.models.eagle import EagleNetwork
from peagle.models.eagle3 import Eagle3Drafter
from peagle.models.layers import at_least_float32
from peagle.models.masks import Elements
from peagle.models.output import OutputRows
from peagle.speculation.trees import BEAM, Lattice
from peagle.teacher_forcing.attention import attention_for


class BeamLattices:
    """At anchors of `row`, with so many drafts [n] behind each other."""

    def __init__(
        self, evaluator: Evaluator, network: EagleNetwork, row: PackedRow, counts: Tensor
    ) -> None:
        self.depth, self.chunk_rows = evaluator.max_tokens, evaluator.chunk_rows
        self.drafter, self.autocast = Eagle3Drafter(network), evaluator.autocast
        self.features = evaluator.source(row, evaluator.source.fetch(row))
        device = self.features.next_tokens.device
        self.counts, self.ops = counts.to(device), step_ops(device)
        self.last_position = network.config.max_position_embeddings - 1  # nothing is drafted beyond
        position = row.position.to(device).long().clamp(max=self.last_position)
        self.prefix = Prefix(row.document.to(device), position, network.config.sliding_window)
        with self.autocast():
            embeddings = network.embed(self.features.next_tokens)
            features = network.features(self.features.aux_hidden_states)
            network(embeddings, features, position, self.prefix)

    def __call__(self, anchors: Tensor) -> Lattice:
        """By path; what is beyond an anchor's drafts means nothing."""
        num_real = torch.ones_like(anchors)
        batch = DraftBatch(
            slots=torch.arange(len(anchors), device=anchors.device),
            tokens=self.features.next_tokens[anchors, None],
            aux_hidden_states=self.features.aux_hidden_states[anchors],
            starts=self.prefix.position[anchors],
            num_real=num_real,
            num_rows=num_real,
            num_drafts=self.counts[anchors],
            depth=self.depth,
            prompt=None,
            attend=BeamAttention(self.prefix, anchors, self.last_position).rows,
            pack=_all_rows,
            pack_depths=lambda first, count: _all_rows(anchors, count),
            sample=self._best,
            candidates=self._candidates,
            temperature=None,
            ops=self.ops,
        )
        with self.autocast():
            lattice = self.drafter.lattice(batch)
        assert lattice is not None, "no anchors"
        return lattice

    def _candidates(
        self, output: OutputRows, packing: Packing, depth: int | None = None, count: int = BEAM
    ) -> Candidates:
        """Those of greedy requests, in chunks: all logits at once would be the largest tensor."""
        parts = [
            self.ops.top_tokens(output._replace(hidden=part).logits(), None, output.ids, count)
            for part in torch.split(output.hidden, self.chunk_rows)
        ]
        shape = -1, packing.rows_per_item, count
        return Candidates(*(torch.cat(x).view(shape) for x in zip(*parts, strict=True)))

    def _best(self, output: OutputRows, first: int, packing: Packing) -> Tensor:
        return self._candidates(output, packing, count=1).token_ids[..., 0]


def _all_rows(items: Tensor, rows_per_item: int) -> Packing:
    return Packing(len(items) * rows_per_item, None, rows_per_item)


class Prefix:
    """Attention among the real rows of a packed row, which keeps their keys and values."""

    def __init__(self, document: Tensor, position: Tensor, window: int | None) -> None:
        self.document, self.position = document, position  # [n]
        self.slot = torch.arange(len(document), device=document.device)
        elements = Elements(self.slot.int(), torch.zeros_like(self.slot).int(), document)
        self.attention = attention_for(elements, position, (window,))
        self.keys: dict[int, Tensor] = {}  # by layer  # [n, g, D]
        self.values: dict[int, Tensor] = {}

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        self.keys[layer], self.values[layer] = k, v
        return self.attention(layer, q, k, v, window, scores)

    def visible(self, anchors: Tensor, positions: Tensor, window: int | None) -> Tensor:
        """What rows at positions [A, Q] see of it, behind the anchors' own.  # [A, Q, n]"""
        same_document = self.document == self.document[anchors, None]
        before_anchor = self.slot < anchors[:, None]
        sees_context = (same_document & before_anchor)[:, None]  # [A, 1, n]
        if window is None:
            return sees_context.expand(-1, positions.shape[1], -1)
        in_window = positions[..., None] - self.position < window  # [A, Q, n]
        return sees_context & in_window


class BeamAttention:
    """Rows of beams, pass by pass, behind anchors of a prefix. Row 0 is the anchor's own."""

    def __init__(self, prefix: Prefix, anchors: Tensor, last_position: int) -> None:
        self.prefix, self.anchors, self.last_position = prefix, anchors, last_position
        self.keys: dict[int, Tensor] = {}  # by layer, of all passes so far  # [A, W, g, D]
        self.values: dict[int, Tensor] = {}

    def rows(self, items: Sequence[RowItems]) -> Rows:
        """The rows of the next pass."""
        (own,) = items
        depths = torch.zeros_like(own.starts)[:, None]  # [A, Q]
        self.ancestors = depths + 1
        if own.tree is not None:
            depths, self.ancestors = own.tree.depths, own.tree.ancestors
        self.positions = (own.starts[:, None] + depths).clamp(max=self.last_position)
        return Rows(self, self.positions.flatten(), _all_rows(self.anchors, depths.shape[1]))

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        assert scores.is_default
        own_k, own_v = self._keep(layer, k, v)
        visible = self.prefix.visible(self.anchors, self.positions, window)
        used = visible.any(0).any(0)  # [n], T of them
        keys = at_least_float32(self.prefix.keys[layer][used])
        values = at_least_float32(self.prefix.values[layer][used])
        visible = torch.cat((visible[..., used], self._sees_own(own_k.shape[1])), dim=-1)
        grouped = at_least_float32(q).view(*self.positions.shape, k.shape[1], -1, q.shape[2])
        grouped = grouped * q.shape[2] ** -0.5  # [A, Q, g, r, D]
        of_prefix = torch.einsum("aqgrd,tgd->agrqt", grouped, keys)
        of_own = torch.einsum("aqgrd,awgd->agrqw", grouped, own_k)
        products = torch.cat((of_prefix, of_own), dim=-1)
        products.masked_fill_(~visible[:, None, None], -torch.inf)
        sizes = [len(keys), own_k.shape[1]]
        of_prefix, of_own = torch.split(products.softmax(-1), sizes, dim=-1)
        out = torch.einsum("agrqt,tgd->aqgrd", of_prefix, values)
        out = out + torch.einsum("agrqw,awgd->aqgrd", of_own, own_v)
        return out.reshape(q.shape).to(q.dtype)

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """-> these and those of the passes before."""
        shape = *self.positions.shape, *k.shape[1:]
        k, v = (at_least_float32(x).view(shape) for x in (k, v))
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k), dim=1)
            v = torch.cat((self.values[layer], v), dim=1)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def _sees_own(self, num_rows: int) -> Tensor:
        """[A, Q, W]; no window is so short that it hides one of them."""
        row = torch.arange(num_rows, device=self.ancestors.device)
        return (self.ancestors[..., None] >> row) & 1 > 0
