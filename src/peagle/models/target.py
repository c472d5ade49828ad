"""The native target: one decoder for all families of config.py, with aux hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.cpu.linear import Weight
from peagle.kernels.policy import FAST, Policy
from peagle.models.attention import Attention
from peagle.models.config import DecoderConfig
from peagle.models.drafter import CacheLayout
from peagle.models.experts import MixtureBesideMLP, MixtureOfExperts
from peagle.models.fused import FusedLayers
from peagle.models.layers import (
    DecoderLayer,
    Linear,
    PostNormLayer,
    RotaryEmbedding,
    make_norm,
    matrix_of,
    output_logits,
)


class TargetOutput(NamedTuple):
    hidden: Tensor  # [N, H], after the final norm
    aux_hidden_states: (
        Tensor | None
    )  # [N, len(aux_hidden_state_layers) * H], None if no layer was asked for


class TargetModel(nn.Module):
    captures = True  # whether a step may be captured in a CUDA graph
    rolls_back = True  # False: no cache can forget rejected drafts; see adapter.py
    has_hidden_states = True  # False: its layers give nothing that a head could read

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.policy = FAST
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            make_layer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config, config.hidden_size)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        positions = config.max_position_embeddings
        self.rotary = RotaryEmbedding(config.rope, positions)
        full = config.full_attention
        self.full_rotary = None if full is None else RotaryEmbedding(full.rope, positions)
        self._fused = None
        if config.has_standard_layers:
            self._fused = FusedLayers(list(self.layers), self.rotary)  # type: ignore[arg-type]

    def bind(self, policy: Policy) -> None:
        """See models.binding."""
        self.policy = policy
        if self._fused is not None:
            self._fused.bind(policy)

    @property
    def weights_per_row(self) -> int:
        """Weights that a row is multiplied with, those of its logits included."""
        return self.config.weights_per_row + self.config.vocab_size * self.config.hidden_size

    @property
    def cache_layout(self) -> CacheLayout:
        """A layer with narrower keys uses the beginning of each row: see `layer_cache`."""
        config = self.config
        row = config.largest_kv_row
        return CacheLayout(config.num_hidden_layers, *row, config.sliding_windows)

    def forward(
        self,
        token_ids: Tensor,  # [N]
        positions: Tensor,  # [N]
        attention: Attention,
        aux_hidden_state_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Layers are counted as vLLM does: i is the residual stream after the first i layers."""
        x = F.embedding(token_ids, self.input_table)
        return self.run(x, positions, attention, aux_hidden_state_layers)

    @property
    def input_table(self) -> Tensor:
        """[V, H]: what `run` is given of each token."""
        return self.embed_tokens.weight

    def run(
        self,
        x: Tensor,  # [N, H]: the tokens' embeddings
        positions: Tensor,  # [N]
        attention: Attention,
        aux_hidden_state_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """`forward` behind the embedding."""
        if self.config.embedding_scale != 1.0:
            # Rounded first, as transformers does it.
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype).item()
        states = None
        if self._fused is not None:
            states = self._fused(x, None, positions, attention, aux_hidden_state_layers)
        if states is not None:
            kept = {i: states[i - 1] if i else x for i in aux_hidden_state_layers}
            x = states[-1]
        else:
            x, kept = self._run_modules(x, positions, attention, aux_hidden_state_layers)
        together = [kept[i] for i in aux_hidden_state_layers]
        return TargetOutput(self.norm(x), torch.cat(together, dim=-1) if together else None)

    def _run_modules(
        self, x: Tensor, positions: Tensor, attention: Attention, kept_layers: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """-> the last layer's output, and that of the layers that are asked for."""
        rotation = self.rotary(positions, x.dtype)
        full = None if self.full_rotary is None else self.full_rotary(positions, x.dtype)
        kept = {0: x} if 0 in kept_layers else {}
        for depth, layer in enumerate(self.layers, start=1):
            x = layer(x, full if self.config.is_full(depth - 1) else rotation, attention)
            if depth in kept_layers:
                kept[depth] = x
        return x, kept

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V] in float32 or better, the precision that sampling is defined in."""
        logits = output_logits(*self.output_product(hidden), self.policy)
        return self.adjusted(logits) if self.changes_logits else logits

    @property
    def changes_logits(self) -> bool:
        return self.config.changes_logits

    def adjusted(self, logits: Tensor) -> Tensor:
        """What the model makes of the product with its output table."""
        config = self.config
        logits = logits * config.logit_scale
        return logits if config.logit_cap is None else softcapped(logits, config.logit_cap)

    def output_product(self, hidden: Tensor) -> tuple[Tensor, Weight]:
        """models.output.OutputLayer; `forward` has normed the rows."""
        return hidden, matrix_of(self.lm_head)


def make_layer(config: DecoderConfig, layer: int) -> nn.Module:
    experts = config.experts_of(layer)
    if config.norm_places != "before":
        beside = None if experts is None else MixtureBesideMLP(config, experts)
        return PostNormLayer(config, layer, beside)
    mlp = None if experts is None else MixtureOfExperts(config, experts)
    return DecoderLayer(config, layer, mlp)


def softcapped(logits: Tensor, cap: float) -> Tensor:
    return cap * (logits / cap).tanh()


def default_aux_hidden_state_layers(num_hidden_layers: int) -> tuple[int, int, int]:
    """The layers that EAGLE-3 and every released P-EAGLE head read: early, middle, late."""
    return 2, num_hidden_layers // 2, num_hidden_layers - 3
