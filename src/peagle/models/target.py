"""The native target: a decoder for the dense Llama family, with aux hidden states for drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peagle.kernels.policy import FAST, Policy
from peagle.models.attention import Attention
from peagle.models.config import DecoderConfig
from peagle.models.fused import FusedLayers
from peagle.models.layers import DecoderLayer, Linear, RMSNorm, RotaryEmbedding, output_logits


class TargetOutput(NamedTuple):
    hidden: Tensor  # [N, H], after the final norm
    aux_hidden_states: (
        Tensor | None
    )  # [N, len(aux_hidden_state_layers) * H], None if no layer was asked for


class TargetModel(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.policy = FAST
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = RotaryEmbedding(config)
        self._fused = FusedLayers(list(self.layers), self.rotary)  # type: ignore[arg-type]

    def bind(self, policy: Policy) -> None:
        """See models.binding."""
        self.policy = policy
        self._fused.bind(policy)

    def forward(
        self,
        token_ids: Tensor,  # [N]
        positions: Tensor,  # [N]
        attention: Attention,
        aux_hidden_state_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Layers are counted as vLLM does: i is the residual stream after the first i layers."""
        return self.run(self.embed_tokens(token_ids), positions, attention, aux_hidden_state_layers)

    def run(
        self,
        x: Tensor,  # [N, H]: the tokens' embeddings
        positions: Tensor,  # [N]
        attention: Attention,
        aux_hidden_state_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """`forward` behind the embedding."""
        states = self._fused(x, None, positions, attention)
        if states is not None:
            aux_hidden_states = {i: states[i - 1] if i else x for i in aux_hidden_state_layers}
            x = states[-1]
        else:
            rotation = self.rotary(positions, x.dtype)
            aux_hidden_states = {0: x} if 0 in aux_hidden_state_layers else {}
            for depth, layer in enumerate(self.layers, start=1):
                x = layer(x, rotation, attention)
                if depth in aux_hidden_state_layers:
                    aux_hidden_states[depth] = x
        together = (
            torch.cat([aux_hidden_states[i] for i in aux_hidden_state_layers], dim=-1)
            if aux_hidden_state_layers
            else None
        )
        return TargetOutput(self.norm(x), together)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V] in float32 or better, the precision that sampling is defined in."""
        return output_logits(*self.output_product(hidden), self.policy)

    def output_product(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """models.output.OutputLayer; `forward` has normed the rows."""
        return hidden, self.lm_head.weight


def default_aux_hidden_state_layers(num_hidden_layers: int) -> tuple[int, int, int]:
    """The layers that EAGLE-3 and every released P-EAGLE head read: early, middle, late."""
    return 2, num_hidden_layers // 2, num_hidden_layers - 3
