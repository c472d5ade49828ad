"""One segment forward, to the states that the loss reads. The network is the one that serves.

P-EAGLE computes all depths in one pass: real rows, and mask rows for the rollouts.

EAGLE-3 is trained by test-time training: the drafter is unrolled on its own states, as when it
serves. Step j of anchor a is the element (a, j): the embedding of the true token at a+j+1, the
feature that step j-1 left at (a, j-1), position a+j. It sees the real rows up to a and its own
chain: the same predicate as P-EAGLE's rollouts with depth = step. Steps run one after the other,
so a chain sees its earlier steps through the keys and values that they left here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.cpu.linear import Weight
from peagle.kernels.reference.attention import PLAIN, Scores
from peagle.models.attention import MaskedAttention
from peagle.models.eagle import EagleNetwork
from peagle.models.masks import Elements, dense_mask
from peagle.models.rollouts import rollout_rows
from peagle.teacher_forcing.attention import FlexAttention, attention_for, compiled_flex_attention
from peagle.teacher_forcing.features import Features
from peagle.teacher_forcing.partition import Segment


class DraftOutput(NamedTuple):
    states: Tensor  # [C, H] of the loss rows, after the final norm
    corrected: Tensor | None  # [C, H] the same behind the tokens before; None: no correction
    table: Weight  # [Vd, H]

    @property
    def trained(self) -> Tensor:
        return self.states if self.corrected is None else self.corrected


class DraftModel(nn.Module):
    """The network with the forward pass that training needs: what DDP and FSDP wrap."""

    def __init__(self, network: EagleNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, segment: Segment, features: Features) -> DraftOutput:
        if self.network.config.method == "p-eagle":
            states = loss_states(self.network, segment, features)
        else:
            states = self._unrolled_states(segment, features)
        corrected = self._corrected(states, segment, features)
        return DraftOutput(states, corrected, self.network.output_weight())

    def _corrected(self, states: Tensor, segment: Segment, features: Features) -> Tensor | None:
        """With the true token before each: a draft counts only where all before it were right."""
        if self.network.correction is None:
            return None
        tokens = features.next_tokens[(segment.slots - 1).clamp(min=0)]  # at `slots`
        corrected = self.network.correction(states, self.network.embed(tokens))
        return torch.where((segment.loss_depth > 0)[:, None], corrected, states)

    def _unrolled_states(self, segment: Segment, features: Features) -> Tensor:
        n = segment.last
        document, position = segment.elements.document[:n], segment.positions[:n]
        steps = unroll(self.network, features, document, position, len(segment.positions) // n)
        out: Tensor = self.network.norm(torch.cat(steps).index_select(0, segment.rows))
        return out


def loss_states(network: EagleNetwork, segment: Segment, features: Features) -> Tensor:
    """States after the final norm [C, H] of the loss rows: the only ones that get logits."""
    hidden = segment_hidden(network, segment, features)
    out: Tensor = network.norm(torch.index_select(hidden, 0, segment.rows))
    return out


def segment_hidden(network: EagleNetwork, segment: Segment, features: Features) -> Tensor:
    """Hidden states [R, H], before the final norm, of every row of the segment."""
    here = slice(segment.first, segment.last)
    embeddings, row_features = rollout_rows(
        network, features.next_tokens[here], features.aux_hidden_states[here], segment.num_masks
    )
    padding = len(segment.positions) - len(embeddings)
    window = network.config.sliding_window
    attention = attention_for(segment.elements, segment.positions, (window,))
    out: Tensor = network(
        F.pad(embeddings, (0, 0, 0, padding)),
        F.pad(row_features, (0, 0, 0, padding)),
        segment.positions,
        attention,
    )
    return out


def unroll(
    network: EagleNetwork,
    features: Features,
    document: Tensor,  # [n]
    position: Tensor,  # [n]
    num_steps: int,
) -> list[Tensor]:
    """Hidden states [n, H], before the final norm, of every anchor at steps 0 .. num_steps - 1.

    A chain that leaves its document goes on with foreign tokens; nobody but itself sees that,
    and it is not in the loss.
    """
    slot = torch.arange(len(document), device=document.device, dtype=torch.int32)
    elements = Elements(slot, torch.zeros_like(slot), document)
    window = network.config.sliding_window
    windows = tuple(window_at(step, window) for step in range(num_steps))
    attention = ChainAttention(context_for(elements, position, windows))
    last_position = network.config.max_position_embeddings - 1
    tokens, feature = features.next_tokens, network.features(features.aux_hidden_states)
    steps: list[Tensor] = []
    for step in range(num_steps):
        at = (position + step).clamp(max=last_position)
        hidden = network(network.embed(tokens), feature, at, attention)
        steps.append(hidden)
        tokens = tokens.roll(-1)
        feature = network.norm(hidden) if network.config.norm_output else hidden
    return steps


class ChainAttention:
    """Row a of step j sees step 0's rows up to a, and row a of steps 1..j."""

    def __init__(self, context: ContextAttention) -> None:
        self.context = context
        self.keys: dict[int, list[Tensor]] = {}  # by layer, one [n, g, D] per step
        self.values: dict[int, list[Tensor]] = {}

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
        keys, values = self.keys.setdefault(layer, []), self.values.setdefault(layer, [])
        keys.append(k)
        values.append(v)
        step = len(keys) - 1
        out, lse = self.context.with_lse(q, keys[0], values[0], window_at(step, window))
        if not step:
            return out
        first = 1 if window is None else max(1, step - window + 1)
        own_keys = torch.stack([_per_head(x, q.shape[1]) for x in keys[first:]])  # [j, n, h, D]
        own_values = torch.stack([_per_head(x, q.shape[1]) for x in values[first:]])
        precise = torch.promote_types(q.dtype, torch.float32)
        products = (q * own_keys).sum(-1, dtype=precise) * q.shape[-1] ** -0.5  # [j, n, h]
        shares = torch.cat((lse[None].to(precise), products)).softmax(0).to(q.dtype)[..., None]
        return shares[0] * out + (shares[1:] * own_values).sum(0)


def window_at(step: int, window: int | None) -> int | None:
    """Of the real rows, for a row that stands so many positions behind its anchor."""
    return None if window is None else window - step


class ContextAttention(Protocol):
    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]: ...


class DenseContext:
    """Attention to the real rows with the log of the softmax's denominator on any device."""

    def __init__(self, rows: MaskedAttention) -> None:
        self.rows = rows

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        k, v = (_per_head(x, q.shape[1]) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        visible = self.rows.visible(window)
        sees_none = ~visible.any(-1, keepdim=True)  # the window ends behind the anchor
        scores = scores.masked_fill(~(visible | sees_none), float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        lse = scores.logsumexp(-1).masked_fill(sees_none[:, 0], float("-inf"))
        return out, lse.transpose(0, 1)


def context_for(
    elements: Elements, positions: Tensor, windows: tuple[int | None, ...] = (None,)
) -> ContextAttention:
    if elements.anchor.is_cuda:
        return FlexAttention(elements, positions, windows, compiled_flex_attention())
    return DenseContext(MaskedAttention(dense_mask(elements), positions))


def _per_head(x: Tensor, num_heads: int) -> Tensor:
    """Keys or values [n, g, D], repeated for the query heads that share them: [n, h, D]."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def autocast(device: torch.device, dtype: torch.dtype | None) -> Callable[[], Any]:
    return functools.partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not None)
