"""A tiny target on disk, and heads for it as others write them: by hand, not by our exporter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.checkpoints.heads.loading import load_head, save_head
from peagle.checkpoints.targets import load_target
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from tests.tiny.models import UNEVEN

CPU = torch.device("cpu")
MASK = 57
AUX_LAYERS = [1, 2, 4]


def target_of(folder: Path, dtype: torch.dtype = torch.float64) -> TargetModel:
    return load_target(folder, dtype=dtype, device=CPU)


def load(folder: Path, target: TargetModel) -> EagleNetwork:
    return load_head(
        str(folder), target, dtype=target.embed_tokens.weight.dtype, device=CPU
    ).requires_grad_(False)


def native(folder: Path, target: TargetModel, dtype: torch.dtype | None, **changes: Any) -> Path:
    save_head(UNEVEN.make_head(target, **changes), folder, dtype=dtype)
    return folder


def raw_config(**changes: Any) -> dict[str, Any]:
    """What the released heads' config.json says, for the tiny target."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": 59,
        "draft_vocab_size": 59,
        "ptd_token_id": MASK,
        "pard_token": MASK,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
            "use_aux_hidden_state": True,
        },
        "norm_before_residual": False,
        "torch_dtype": "float32",
    } | changes


def speculators_config(model_type: str = "peagle", **changes: Any) -> dict[str, Any]:
    layers = raw_config()
    for name in ("architectures", "ptd_token_id", "pard_token", "eagle_config", "draft_vocab_size"):
        del layers[name]
    config = {
        "speculators_model_type": model_type,
        "speculators_config": {
            "algorithm": model_type,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": 59,
        "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
        "mask_token_id": MASK if model_type == "peagle" else None,
        "norm_before_residual": False,
    }
    return config | changes


def raw_tensors(target: TargetModel, layers: int = 4, **changes: Any) -> dict[str, Tensor]:
    """Random tensors of a P-EAGLE head with tables of its own, under vLLM's names."""
    from peagle.checkpoints.weights import split_weights

    own = {"has_embed_tokens": True, "has_lm_head": True, "num_hidden_layers": layers}
    tensors = {
        n: t.float() for n, t in split_weights(UNEVEN.make_head(target, **own | changes)).items()
    }
    if "mask_embedding" in tensors:
        tensors["embed_tokens.weight"][MASK] = tensors.pop("mask_embedding")
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, -1)
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    options = json.loads((folder / "config.json").read_text())
    change(options)
    (folder / "config.json").write_text(json.dumps(options))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
