"""Random targets and heads of a few thousand weights, of which every one counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from peagle.models.config import DecoderConfig
from peagle.models.drafter import NetworkDrafter
from peagle.models.eagle import EagleNetwork, shared_tables
from peagle.models.eagle3 import Eagle3Drafter
from peagle.models.head_config import HeadConfig
from peagle.models.p_eagle import PEagleDrafter
from peagle.models.target import TargetModel

SCALE = 0.3  # of a target's weights: so large that answers differ and do not fall into a loop
VOCAB, CONTEXT = 40, 96  # of a target for engines
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SAME_SIZES: tuple[str, ...] = (
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
)
SAME_SIZES += ("intermediate_size", "head_dim", "max_position_embeddings", "rms_norm_eps")


@dataclass(frozen=True)
class Sizes:
    """Of a target, as LlamaConfig names them, and how a head for it differs from its layers."""

    target: Mapping[str, Any]
    head: Mapping[str, Any]

    def llama_config(self, **changes: Any) -> LlamaConfig:
        return LlamaConfig(**{**self.target, **changes})

    def make_target(
        self,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        sliding_windows: tuple[int | None, ...] = (),
        **changes: Any,
    ) -> TargetModel:
        config = DecoderConfig.from_transformers(self.llama_config(**changes))
        object.__setattr__(config, "sliding_windows", sliding_windows)
        model = TargetModel(config).to(dtype)
        randomise(model, seed, SCALE)
        return model.requires_grad_(False).eval()

    def head_config(
        self, method: str = "p-eagle", target: DecoderConfig | None = None, **changes: Any
    ) -> HeadConfig:
        """Of a head for `target`, or for the target of these sizes."""
        sizes = target or DecoderConfig.from_transformers(self.llama_config())
        fields: dict[str, Any] = {
            "method": method,
            "target_model": "tiny",
            "target_hidden_size": sizes.hidden_size,
            "target_num_hidden_layers": sizes.num_hidden_layers,
            "rope_parameters": dict(ROPE),
            "draft_vocab_size": sizes.vocab_size,
            **{name: getattr(sizes, name) for name in SAME_SIZES},
            **self.head,
        }
        if method == "eagle3":
            fields["num_hidden_layers"] = 1
        return HeadConfig(**fields | changes)

    def make_head(
        self, target: TargetModel, method: str = "p-eagle", seed: int = 1, **changes: Any
    ) -> EagleNetwork:
        config = self.head_config(method, target.config, **changes)
        network = EagleNetwork(config, shared_tables(target))
        network.to(target.embed_tokens.weight.dtype)
        randomise(network, seed)
        if config.reduced_vocabulary:
            every = torch.randperm(config.vocab_size, generator=_generator(seed))
            network.target_ids = every[: config.draft_vocab_size]
        return network.requires_grad_(False).eval()

    def tokens(self, count: int, seed: int = 0) -> Tensor:
        return torch.randint(self.target["vocab_size"], (count,), generator=_generator(seed))


# For engines, whose answers are computed again from scratch for every token: two layers.
SHALLOW = Sizes(
    {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": ROPE,
    },
    {
        "num_hidden_layers": 1,
        "aux_hidden_state_layer_ids": (0, 1, 2),
        "max_speculative_tokens": 16,
        "num_speculative_tokens": 4,
    },
)

# For modules and checkpoints: sizes that differ, so that a tensor in the wrong place does not fit.
UNEVEN = Sizes(
    {
        "vocab_size": 59,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    {
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "head_dim": 6,
        "aux_hidden_state_layer_ids": (1, 2, 4),
        "max_speculative_tokens": 8,
        "num_speculative_tokens": 5,
    },
)

# For training: aux hidden states from layers that are neither the first nor the last, and narrow.
DEEP = Sizes(
    {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rope_parameters": ROPE,
    },
    {
        "num_hidden_layers": 2,
        "aux_hidden_state_layer_ids": (2, 3, 5),
        "max_speculative_tokens": 4,
        "num_speculative_tokens": 3,
    },
)


def randomise(module: nn.Module, seed: int = 0, scale: float = 0.2) -> None:
    """No zeros and no ones: a bias or a norm that is left out must show."""
    generator = _generator(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm = "norm" in name
            parameter.copy_(1 + noise if is_norm else noise)


def reference(config: PretrainedConfig, seed: int = 0) -> Any:
    """A transformers model with random weights."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed, SCALE)
    return model.eval()


def save_reference(folder: Path, config: PretrainedConfig | None = None, **options: Any) -> Any:
    model = reference(config or UNEVEN.llama_config())
    model.save_pretrained(folder, **options)
    return model


def head_drafter(network: EagleNetwork) -> NetworkDrafter:
    if network.config.method == "p-eagle":
        return PEagleDrafter(network)
    return Eagle3Drafter(network)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
