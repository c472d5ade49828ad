"""Targets and heads of other shapes: windows, biases, norms of queries and keys, tied tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from peagle.models.config import DecoderConfig
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams

from .. import tiny
from ..tiny import GREEDY, Job
from .lane_tiny import Script, ScriptedHead, check_naive, check_same, known, scripted_engine

SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": tiny.CONTEXT,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "query biases": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "query and key norms": Qwen3Config(**SIZES, tie_word_embeddings=True),
}


def build(config: PretrainedConfig) -> TargetModel:
    model = TargetModel(DecoderConfig.from_transformers(config)).to(torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            base = 1.0 if weight.dim() == 1 else 0.0  # norms; biases of about 1 do as well
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(base + 0.3 * noise)
    return model.requires_grad_(False).eval()


def jobs() -> list[Job]:
    params = (GREEDY, SamplingParams(seed=6, top_p=0.9, max_tokens=15, ignore_eos=True))
    texts = tiny.prompts(4, seed=3, longest=30)
    return [Job(p, params[n % 2], joins=n) for n, p in enumerate(texts)]


def check_target(model: TargetModel, method: str, **changes: Any) -> None:
    drafter = tiny.head_drafter(tiny.make_head(model, method, **changes))
    script = Script(known(model, jobs()), seed=3)
    lanes = scripted_engine(model, drafter, script, 4, max_num_batched_tokens=32)
    plain = tiny.make_engine(model, ScriptedHead(drafter, script), 4)
    check_naive(model, check_same(lanes, plain, jobs()), jobs())


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("name", CONFIGS)
def test_other_targets(name: str, method: str) -> None:
    check_target(build(CONFIGS[name]), method)


@pytest.mark.parametrize("windows", [(5, None), (None, 17), (3, 3)])
def test_sliding_windows(windows: tuple[int | None, ...]) -> None:
    check_target(tiny.make_target(sliding_windows=windows), "p-eagle", num_hidden_layers=2)
