"""Sizes of a dense decoder and of a drafter, as much as the cost of a step depends on them.

Read from config.json alone: the weights may lie anywhere, or nowhere yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from peagle.errors import ConfigError, ModelError

# transformers' names of the number of experts; a mixture reads only some of its weights a step.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
P_EAGLE_LAYERS, EAGLE3_LAYERS = 4, 1  # of the released heads


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def num_parameters(self) -> int:
        """Of the products; the input embedding is looked up, not multiplied."""
        return self.num_layers * sum(self.layer_products()) + self.hidden_size * self.vocab_size

    def layer_products(self) -> tuple[int, int, int, int]:
        """Weights of q/k/v, output, gate/up and down."""
        h, i = self.hidden_size, self.intermediate_size
        attention = self.num_heads * self.head_dim
        return h * (attention + self.kv_values_per_token()), attention * h, 2 * h * i, i * h

    def kv_values_per_token(self) -> int:
        """Of one layer."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """A head. `parallel`: one pass drafts all tokens (P-EAGLE); else one pass each (EAGLE-3)."""

    method: str
    decoder: DecoderShape
    parallel: bool


def decoder_shape(config: Mapping[str, Any], where: str) -> DecoderShape:
    """From a transformers config.json, text models of dense layers."""
    config = config.get("text_config", config)
    if any((config.get(key) or 0) > 1 for key in EXPERT_KEYS):
        raise ModelError(
            f"{where} is a mixture of experts, whose step costs are not computed",
            hint="measure them: peagle simulate --costs FILE",
        )
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return DecoderShape(
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab_size=int(config["vocab_size"]),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{where} does not give a decoder's sizes: {error!r}") from None


def drafter_shape(
    method: str, target: DecoderShape, *, num_layers: int | None = None, vocab: int | None = None
) -> DrafterShape | None:
    """A head as wide as its target, as the released ones are; None: drafts cost nothing."""
    if method == "ngram":
        return None
    if method not in ("p-eagle", "eagle3"):
        raise ConfigError(f"no sizes for method {method!r}", hint="p-eagle, eagle3 or ngram")
    parallel = method == "p-eagle"
    layers = num_layers or (P_EAGLE_LAYERS if parallel else EAGLE3_LAYERS)
    decoder = replace(target, num_layers=layers, vocab_size=vocab or target.vocab_size)
    return DrafterShape(method=method, decoder=decoder, parallel=parallel)
