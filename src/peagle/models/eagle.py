"""The network that P-EAGLE and EAGLE-3 share: one definition for training and for serving.

A row pairs the embedding of the token at p+1 with the target's feature at p, and predicts the
token at p+2. Layer 0 reads [embedding ; feature], 2H wide; later layers are decoder layers
as in a target. P-EAGLE adds the mask embedding and the mask hidden, which stand in where neither is
known yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from peagle.errors import HeadError
from peagle.kernels.cpu.linear import PackedWeight, Weight, packed, rows_of
from peagle.kernels.policy import FAST, Policy, gpu_takes
from peagle.models.attention import Attention
from peagle.models.config import DecoderConfig
from peagle.models.correction import Correction
from peagle.models.fused import FusedLayers
from peagle.models.head_config import HeadConfig
from peagle.models.layers import (
    DecoderLayer,
    GatedMLP,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    SelfAttention,
    matrix_of,
    output_logits,
)
from peagle.models.target import TargetModel


class SharedTables(NamedTuple):
    """The target's tables that a compact head borrows. Not a module: they are never the head's."""

    embed_tokens: nn.Embedding
    lm_head: nn.Linear


class FirstLayer(nn.Module):
    """Layer 0: attends over [embedding ; feature], each with a norm of its own."""

    def __init__(self, config: DecoderConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, 0, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def inputs(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """-> the residual stream [N, H], and what attention reads [N, 2H]."""
        if features.dim() == 2 and features.dtype == embeddings.dtype and gpu_takes(features):
            return self._inputs_on_gpu(embeddings, features)
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        return residual, torch.cat((self.input_layernorm(embeddings), normed), dim=-1)

    def _inputs_on_gpu(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        from peagle.kernels.gpu.norms import norm_pair

        weights = self.input_layernorm.weight, self.hidden_norm.weight
        inputs = norm_pair(embeddings, features, *weights, self.hidden_norm.eps)
        normed = inputs[:, features.shape[1] :]
        return normed if self.norm_before_residual else features, inputs

    def forward(
        self, embeddings: Tensor, features: Tensor, rotation: Rotation, attention: Attention
    ) -> Tensor:
        residual, inputs = self.inputs(embeddings, features)
        x = residual + self.self_attn(inputs, rotation, attention)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class EagleNetwork(nn.Module):
    """Rows in, hidden states out. Which rows, and what follows from them, is the caller's."""

    changes_logits = False  # models.output.OutputLayer

    target_ids: Tensor  # [Vd]: the target's id of each draft id

    def __init__(self, config: HeadConfig, shared: SharedTables) -> None:
        super().__init__()
        self.config = config
        self.policy = FAST
        self.shared = shared
        decoder = config.decoder()
        size = config.hidden_size
        num_aux_hidden_states = len(config.aux_hidden_state_layer_ids)
        self.fc = Linear(num_aux_hidden_states * config.target_hidden_size, size, bias=False)
        self.input_norm = (
            RMSNorm(self.fc.in_features, config.rms_norm_eps) if config.norm_before_fc else None
        )
        self.fc_norm = nn.ModuleList(
            RMSNorm(config.target_hidden_size, config.rms_norm_eps)
            for _ in range(num_aux_hidden_states if config.fc_norm else 0)
        )
        self.layers = nn.ModuleList(
            [FirstLayer(decoder, config.norm_before_residual)]
            + [DecoderLayer(decoder, layer) for layer in range(1, config.num_hidden_layers)]
        )
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(decoder.rope, decoder.max_position_embeddings)
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, size) if config.has_embed_tokens else None
        )
        self.lm_head = (
            Linear(size, config.draft_vocab_size, bias=False) if config.has_lm_head else None
        )
        if config.method == "p-eagle":
            self.mask_embedding = nn.Parameter(torch.zeros(size))
            self.mask_hidden = nn.Parameter(torch.zeros(self.fc.in_features))
        self.correction = (
            None
            if config.correction_size is None
            else Correction(size, config.correction_size, config.rms_norm_eps)
        )
        self._fused = FusedLayers(list(self.layers), self.rotary)  # type: ignore[arg-type]
        self._output_rows: Weight | None = None
        self._draft_ids: Tensor | None = None
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size), persistent=False)

    @property
    def weights_per_row(self) -> int:
        """Weights that a row is multiplied with that the network only reads."""
        return self.config.decoder().weights_per_row + self.fc.in_features * self.fc.out_features

    @property
    def weights_per_draft(self) -> int:
        """Those that a row of drafts is multiplied with, its logits included."""
        config, correction = self.config, self.correction
        weights = config.decoder().weights_per_row + config.draft_vocab_size * config.hidden_size
        return weights + (0 if correction is None else correction.weights_per_row)

    def bind(self, policy: Policy) -> None:
        """See models.binding."""
        self.policy = policy
        self._fused.bind(policy)

    def features(self, aux_hidden_states: Tensor) -> Tensor:
        """The target's aux hidden states [N, 3H] -> features [N, H]."""
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.fc_norm:
            parts = aux_hidden_states.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            aux_hidden_states = torch.cat(normed, dim=-1)
        out: Tensor = self.fc(aux_hidden_states)
        return out

    def mask_feature(self) -> Tensor:
        """The feature [H] of every mask row: fc of the one learned hidden state."""
        return self.features(self.mask_hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        out: Tensor = self.embedding(token_ids)
        return out

    @property
    def embedding(self) -> nn.Embedding:
        """The head's own table, or the target's."""
        return self.shared.embed_tokens if self.embed_tokens is None else self.embed_tokens

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """[N, H] twice and positions [N] -> hidden states [N, H] before the final norm."""
        if self._fused.may_run(features, attention):
            first = self.layers[0]
            assert isinstance(first, FirstLayer)
            states = self._fused(*first.inputs(embeddings, features), positions, attention)
            if states is not None:
                return states[-1]
        rotation = self.rotary(positions, features.dtype)
        # Through its forward: FSDP and torch.compile hang on it.
        x = self.layers[0](embeddings, features, rotation, attention)
        for layer in self.layers[1:]:
            x = layer(x, rotation, attention)
        return x  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states before the final norm [N, H] -> draft logits [N, Vd]."""
        return output_logits(*self.output_product(hidden), self.policy)

    def output_product(self, hidden: Tensor) -> tuple[Tensor, Weight]:
        """models.output.OutputLayer."""
        return self.norm(hidden), self.output_weight()

    def output_weight(self) -> Weight:
        """[Vd, H]: the head's own output table, or its share of the target's."""
        if self.lm_head is not None:
            return matrix_of(self.lm_head)
        table = matrix_of(self.shared.lm_head)
        if not self.config.reduced_vocabulary:
            return table
        if self._output_rows is None:  # the target's table never changes: gathered once
            with torch.inference_mode(False), torch.no_grad():
                rows = rows_of(table, self.target_ids)
                self._output_rows = packed(rows) if isinstance(table, PackedWeight) else rows
        return self._output_rows

    def output_rows(self, token_ids: Tensor) -> tuple[Weight, Tensor]:
        """An output table, and its rows for tokens that the head drafts, in the target's ids."""
        if self.lm_head is None:
            return matrix_of(self.shared.lm_head), token_ids
        rows = self.draft_ids()[token_ids] if self.config.reduced_vocabulary else token_ids
        return matrix_of(self.lm_head), rows

    def draft_ids(self) -> Tensor:
        """[V]: the draft id of each of the target's ids, -1 where there is none."""
        if self._draft_ids is None:
            with torch.inference_mode(False), torch.no_grad():
                ids = torch.full((self.config.vocab_size,), -1, device=self.target_ids.device)
                ids[self.target_ids] = torch.arange(len(self.target_ids), device=ids.device)
                self._draft_ids = ids
        return self._draft_ids


def shared_tables(target: TargetModel) -> SharedTables:
    return SharedTables(target.embed_tokens, target.lm_head)


def initialise(
    network: EagleNetwork,
    target: TargetModel,
    generator: torch.Generator,
    *,
    from_target: bool = False,
) -> None:
    """Starting weights for training: small matrices, tables and final norm from the target.

    The mask embedding starts at the mean of the table, a point that no token occupies, and the
    mask hidden at small noise: zeros would make layer 0's norm divide nothing by nothing.
    `from_target` also copies the target's last layers; see `copy_last_layers`.
    """
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.02, generator=generator)
        if network.embed_tokens is not None:
            network.embed_tokens.weight.copy_(target.embed_tokens.weight)
        if network.lm_head is not None:
            network.lm_head.weight.copy_(rows_of(matrix_of(target.lm_head), network.target_ids))
        if network.norm.weight.shape == target.norm.weight.shape:
            network.norm.weight.copy_(target.norm.scale)
        if network.config.method == "p-eagle":
            network.mask_embedding.copy_(target.embed_tokens.weight.mean(dim=0))
            network.mask_hidden.normal_(0.0, 0.02, generator=generator)
        if from_target:
            copy_last_layers(network, target)


def copy_last_layers(network: EagleNetwork, target: TargetModel) -> None:
    """Starts the drafter as the target's own last layers, fed with its latest aux state.

    The features then begin as the last aux hidden state, and every layer computes what the
    target's layer of the same distance from the end computes. Needs the target's sizes.
    """
    if not target.config.has_standard_layers:
        raise HeadError(
            "copy_target_layers needs a target whose layers are like a head's",
            hint="train this head with head.copy_target_layers=false",
        )
    last = list(target.layers)[-len(network.layers) :]
    first, source = network.layers[0], last[0]
    assert isinstance(first, FirstLayer)
    assert isinstance(source, DecoderLayer)
    size = network.config.hidden_size
    if source.self_attn.qkv_proj.bias is not None or source.self_attn.q_norm is not None:
        raise HeadError(
            "copy_target_layers needs a target without qkv bias and q/k norms",
            hint="train this head with head.copy_target_layers=false",
        )
    network.fc.weight.zero_()
    network.fc.weight[:, -size:].copy_(torch.eye(size))
    first.hidden_norm.weight.copy_(source.input_layernorm.weight)
    first.self_attn.qkv_proj.weight[:, size:].copy_(source.self_attn.qkv_proj.weight)
    first.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight)
    first.post_attention_layernorm.load_state_dict(source.post_attention_layernorm.state_dict())
    first.mlp.load_state_dict(source.mlp.state_dict())
    for layer, original in zip(list(network.layers)[1:], last[1:], strict=True):
        layer.load_state_dict(original.state_dict())
