"""A tiny target, and a P-EAGLE head for it as others release them: written here by hand.

Four layers, tables of its own, full vocabulary, `mask_hidden`, `ptd_token_id`. The target's next
token depends mostly on the one before, and the head knows that much, so that some drafts are kept
and others are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from tests.tiny.folders import byte_tokenizer

HIDDEN, HEADS, HEAD_DIM, CONTEXT = 64, 2, 32, 256
TARGET_LAYERS, HEAD_LAYERS = 6, 4
AUX_LAYERS = [2, 3, 5]
NOISE = 0.08


def write_target(folder: Path, kind: type[PretrainedConfig] = LlamaConfig, **more: Any) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    options = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": TARGET_LAYERS,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        **_sizes(),
    }
    config = kind(**options | more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    # Gemma-3 adds 1 to the weight of a norm.
    norm = 0.0 if config.model_type == "gemma3_text" else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_norm_or_noise(name, weight.shape, norm))
        table = torch.randn(len(tokenizer), HIDDEN)
        model.model.embed_tokens.weight.copy_(table)
        # A tenth of it: flat enough for sampling and penalties to change something.
        model.lm_head.weight.copy_(0.1 * table[_following(len(tokenizer))])
    model.save_pretrained(folder)
    return folder


def write_released_head(folder: Path, target: Path, num_layers: int = HEAD_LAYERS) -> Path:
    folder.mkdir(parents=True)
    weights = AutoModelForCausalLM.from_pretrained(target)
    table = weights.model.embed_tokens.weight.detach().clone()
    mask_token_id = len(table) - 1
    torch.manual_seed(1)
    tensors = {
        name: _norm_or_noise(name, shape) for name, shape in _head_shapes(num_layers).items()
    }
    tensors["fc.weight"] += torch.cat([torch.eye(HIDDEN)] * 3, dim=1) / 3
    tensors["mask_hidden"] = torch.randn(1, 3 * HIDDEN)
    tensors["embed_tokens.weight"] = table
    # The row at p has the feature of p and drafts p+2: two steps of the target's habit at once.
    following = _following(len(table))
    tensors["lm_head.weight"] = table[following][following].clone()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    config = _config(len(table), mask_token_id) | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _config(vocab_size: int, mask_token_id: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "ptd_token_id": mask_token_id,
        "pard_token": mask_token_id,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
            "use_aux_hidden_state": True,
        },
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **_sizes(),
    }


def _sizes() -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


def _head_shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "layers.0.hidden_norm.weight": (HIDDEN,),
    }
    for layer in range(num_layers):
        width = 2 * HIDDEN if layer == 0 else HIDDEN
        for name, shape in {
            "self_attn.q_proj": (HEADS * HEAD_DIM, width),
            "self_attn.k_proj": (HEAD_DIM, width),
            "self_attn.v_proj": (HEAD_DIM, width),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (96, HIDDEN),
            "mlp.up_proj": (96, HIDDEN),
            "mlp.down_proj": (HIDDEN, 96),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    return shapes


def _norm_or_noise(name: str, shape: Any, norm: float = 1.0) -> Tensor:
    noise = NOISE * torch.randn(shape)
    return norm + noise if "norm" in name else noise


def _following(vocab_size: int) -> Tensor:
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(7))
