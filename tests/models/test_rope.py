"""Rope parity: our inverse frequencies are transformers' to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.errors import ModelError
from peagle.models.rope import rope_parameters

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0},
    "whole number": {"rope_type": "default", "rope_theta": 1000000},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": LLAMA3,
    "llama3 without its context": {
        k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"
    },
    "yarn": YARN,
    "yarn, context": YARN | {"original_max_position_embeddings": 4096},
    "yarn, betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not truncated": YARN | {"truncate": False, "original_max_position_embeddings": 4096},
    "yarn, scale": YARN | {"attention_factor": 1.25},
    "yarn, mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, shrinking": YARN | {"factor": 1.0},
    "yarn, narrow ramp": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
}


def by_transformers(parameters: dict[str, Any], head_dim: int, context: int) -> Any:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_parameters=dict(parameters),
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("head_dim", [6, 64, 128])
@pytest.mark.parametrize("parameters", KINDS.values(), ids=KINDS)
def test_inverse_frequencies_are_those_of_transformers(
    parameters: dict[str, Any], head_dim: int
) -> None:
    frequencies, scale = rope_parameters(
        parameters, head_dim=head_dim, max_position_embeddings=32768
    )
    reference = by_transformers(parameters, head_dim, 32768)
    assert torch.equal(frequencies, reference.inv_freq)
    assert frequencies.dtype == torch.float32
    assert scale == pytest.approx(reference.attention_scaling, abs=0)


@given(
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1.0, 64.0),
    head_dim=st.integers(3, 80).map(lambda half: 2 * half),
    context=st.sampled_from((2048, 8192, 131072)),
    kind=st.sampled_from((LLAMA3, YARN)),
)
def test_other_sizes_agree_too(
    theta: float, factor: float, head_dim: int, context: int, kind: dict[str, Any]
) -> None:
    parameters = kind | {"rope_theta": theta, "factor": factor}
    frequencies, scale = rope_parameters(
        parameters, head_dim=head_dim, max_position_embeddings=context
    )
    reference = by_transformers(parameters, head_dim, context)
    assert torch.equal(frequencies, reference.inv_freq)
    assert scale == reference.attention_scaling


def test_frequencies_are_real_while_modules_are_made_on_meta() -> None:
    with torch.device("meta"):
        frequencies, _ = rope_parameters(YARN, head_dim=8, max_position_embeddings=64)
    assert frequencies.device.type == "cpu"


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "dynamic"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "factor"),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_theta": "many"}, "many"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_parameters_that_cannot_be_used_are_named(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        rope_parameters(parameters, head_dim=8, max_position_embeddings=64)
