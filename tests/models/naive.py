"""A drafter written a second time, from p-eagle.md alone: simple loops, nothing shared with src.

It reads a saved head's tensors under their Hugging Face names and recomputes every row from
nothing for each draft, so no cache, no fused projection and no batching can hide a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    embedding: Tensor  # [H]
    feature: Tensor  # [H]
    position: int


class NaiveHead:
    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], embed: Tensor, lm_head: Tensor
    ) -> None:
        """`embed` [V, H] and `lm_head` [V, H] are the target's."""
        self.config = config
        self.tensors = tensors
        self.embed = tensors.get("embed_tokens.weight", embed)
        draft_ids = torch.arange(config["draft_vocab_size"])
        self.target_ids = draft_ids + tensors.get("d2t", torch.zeros_like(draft_ids))
        self.lm_head = tensors.get("lm_head.weight", lm_head[self.target_ids])

    def p_eagle_logits(self, tokens: Tensor, aux_hidden_states: Tensor, k: int) -> Tensor:
        """Logits [k, Vd] of drafts 1..k after `tokens`; the newest has no aux hidden states yet."""
        rows = self.real_rows(tokens, aux_hidden_states)
        mask_feature = self.tensors["fc.weight"] @ self.tensors["mask_hidden"]
        for _ in range(k - 1):
            position = rows[-1].position + 1
            rows.append(Row(self.tensors["mask_embedding"], mask_feature, position))
        return torch.stack([self.logits(state) for state in self.states(rows)[-k:]])

    def eagle3_logits(self, tokens: Tensor, aux_hidden_states: Tensor, k: int) -> Tensor:
        """The same for a sequential drafter that drafts the most likely token each time."""
        rows = self.real_rows(tokens, aux_hidden_states)
        logits = []
        for _ in range(k):
            state = self.states(rows)[-1]
            logits.append(self.logits(state))
            drafted = int(self.target_ids[int(logits[-1].argmax())])
            feature = self.norm(state, "norm") if self.config["norm_output"] else state
            rows.append(Row(self.embed[drafted], feature, rows[-1].position + 1))
        return torch.stack(logits)

    def real_rows(self, tokens: Tensor, aux_hidden_states: Tensor) -> list[Row]:
        """The row at position p pairs the token at p+1 with the target's feature at p."""
        return [
            Row(self.embed[int(tokens[p + 1])], self.tensors["fc.weight"] @ aux_hidden_states[p], p)
            for p in range(len(tokens) - 1)
        ]

    def states(self, rows: Sequence[Row]) -> list[Tensor]:
        """Hidden states before the final norm; row i sees rows 0..i."""
        inputs, residuals = [], []
        for row in rows:
            embedding = self.norm(row.embedding, "layers.0.input_layernorm")
            feature = self.norm(row.feature, "layers.0.hidden_norm")
            inputs.append(torch.cat([embedding, feature]))
            residuals.append(feature if self.config["norm_before_residual"] else row.feature)
        positions = [row.position for row in rows]
        states = self.rest_of_layer(0, inputs, residuals, positions)
        for layer in range(1, self.config["num_hidden_layers"]):
            inputs = [self.norm(state, f"layers.{layer}.input_layernorm") for state in states]
            states = self.rest_of_layer(layer, inputs, states, positions)
        return states

    def rest_of_layer(
        self,
        layer: int,
        inputs: Sequence[Tensor],
        residuals: Sequence[Tensor],
        positions: Sequence[int],
    ) -> list[Tensor]:
        name = f"layers.{layer}"
        queries, keys, values = (
            [self.tensors[f"{name}.self_attn.{p}_proj.weight"] @ x for x in inputs] for p in "qkv"
        )
        dim = self.config["head_dim"]
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        window = self.config["sliding_window"] or len(inputs)
        states = []
        for i, residual in enumerate(residuals):
            first = max(0, i + 1 - window)
            heads = []
            for head in range(self.config["num_attention_heads"]):
                own = slice(head * dim, (head + 1) * dim)
                shared = slice(head // group * dim, (head // group + 1) * dim)
                query = self.rotated(queries[i][own], positions[i])
                scores = [
                    query @ self.rotated(keys[j][shared], positions[j]) / math.sqrt(dim)
                    for j in range(first, i + 1)
                ]
                weights = torch.softmax(torch.stack(scores), dim=0)
                heads.append(sum(w * values[j][shared] for j, w in enumerate(weights, first)))
            attended = self.tensors[f"{name}.self_attn.o_proj.weight"] @ torch.cat(heads)
            state = residual + attended
            normed = self.norm(state, f"{name}.post_attention_layernorm")
            gate = self.tensors[f"{name}.mlp.gate_proj.weight"] @ normed
            up = self.tensors[f"{name}.mlp.up_proj.weight"] @ normed
            swished = gate * torch.sigmoid(gate) * up
            states.append(state + self.tensors[f"{name}.mlp.down_proj.weight"] @ swished)
        return states

    def logits(self, state: Tensor) -> Tensor:
        return self.lm_head @ self.norm(state, "norm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = (x * x).sum() / len(x)
        root = torch.sqrt(mean_square + self.config["rms_norm_eps"])
        return x / root * self.tensors[f"{name}.weight"]

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """Turns the pairs (x[i], x[i + D/2]) by position / theta^(2i/D)."""
        half = len(x) // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        out = torch.empty_like(x)
        for i in range(half):
            angle = position * theta ** (-2 * i / len(x))
            a, b = x[i], x[i + half]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out
