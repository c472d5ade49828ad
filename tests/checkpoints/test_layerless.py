"""A target without its layers still turns its last residual stream into its own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from peagle.checkpoints.targets import load_layerless
from peagle.errors import ModelError
from tests.tolerance import near

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        MixtralConfig(**SIZES, **EXPERTS),
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        GptOssConfig(**SIZES, **EXPERTS),
        Gemma3TextConfig(**SIZES, final_logit_softcapping=2.0),
    ],
    ids=lambda config: config.model_type,
)
def test_norm_and_output_table_give_the_models_logits(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.model.norm.weight)
    residual: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: residual.append(inputs[0]))
    model.save_pretrained(tmp_path)
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        logits = model(tokens).logits[0]
        target = load_layerless(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
        ours = target.logits(target.norm(residual[0][0]))
    torch.testing.assert_close(ours, logits, **near(logits, terms=model.config.hidden_size))
    assert torch.equal(target.embed_tokens.weight, model.model.embed_tokens.weight)
    assert len(target.layers) == 0
    assert target.config.num_hidden_layers == 2


def test_a_family_that_is_not_known_is_refused(tmp_path: Path) -> None:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 16}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="model type 'gpt2' has no native implementation"):
        load_layerless(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
