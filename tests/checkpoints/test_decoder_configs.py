"""config.json read as it is gives what transformers' classes give."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from peagle.checkpoints import decoder_configs
from peagle.checkpoints.decoder_configs import read_decoder_config
from peagle.checkpoints.references import load_config
from peagle.errors import ModelError
from peagle.models.config import DecoderConfig
from tests.tiny.models import UNEVEN

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
COMPLETE = {
    "llama": LlamaConfig(**UNEVEN.target),
    "llama biases": LlamaConfig(**UNEVEN.target, attention_bias=True, mlp_bias=True),
    "llama tied": LlamaConfig(**UNEVEN.target | {"tie_word_embeddings": True}),
    "llama yarn": LlamaConfig(**UNEVEN.target, rope_parameters=YARN),
    "mistral": MistralConfig(**UNEVEN.target, sliding_window=None),
    "mistral window": MistralConfig(**UNEVEN.target, sliding_window=7),
    "qwen2": Qwen2Config(**UNEVEN.target),
    "qwen3": Qwen3Config(**UNEVEN.target, head_dim=12, attention_bias=True),
}
# As the older versions of transformers wrote them.
FORMER: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 5000.0, "rope_scaling": None},
    "llama linear": {
        "model_type": "llama",
        "rope_theta": 5000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "llama3": {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {
        "model_type": "qwen2",
        "rope_theta": 1000000,
        "use_sliding_window": False,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "mistral": {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": 5, "head_dim": None},
}


def same(ours: DecoderConfig, theirs: DecoderConfig) -> bool:
    a, b = vars(ours), vars(theirs)
    return all(
        torch.equal(a[f.name], b[f.name])
        if f.name == "inverse_frequencies"
        else a[f.name] == b[f.name]
        for f in dataclasses.fields(DecoderConfig)
    )


def write(folder: Path, options: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(options))


def sizes() -> dict[str, Any]:
    written = LlamaConfig(**UNEVEN.target).to_dict()
    return {name: written[name] for name in (*decoder_configs.SIZES, "hidden_act")} | {
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise AssertionError("transformers was asked")

    monkeypatch.setattr(decoder_configs, "load_config", refuse)


@pytest.mark.parametrize("config", COMPLETE.values(), ids=COMPLETE)
@pytest.mark.usefixtures("no_transformers")
def test_a_complete_config_is_read_without_transformers(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    theirs = DecoderConfig.from_transformers(load_config(tmp_path))
    assert same(read_decoder_config(tmp_path), theirs)


@pytest.mark.parametrize("options", FORMER.values(), ids=FORMER)
@pytest.mark.usefixtures("no_transformers")
def test_older_words_mean_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, sizes() | options)
    theirs = DecoderConfig.from_transformers(load_config(tmp_path))
    assert same(read_decoder_config(tmp_path), theirs)


LEFT_TO_DEFAULTS: dict[str, dict[str, Any]] = {
    "no theta": {"model_type": "llama"},
    "no head_dim": {"model_type": "qwen3", "rope_theta": 1e4, "use_sliding_window": False},
    "no window": {"model_type": "mistral", "rope_theta": 1e4},
    "a window in some layers": {"model_type": "qwen2", "rope_theta": 1e4, **WINDOW},
    "context outside": {
        "model_type": "llama",
        "original_max_position_embeddings": 16,
        "rope_parameters": YARN,
    },
}


@pytest.mark.parametrize("options", LEFT_TO_DEFAULTS.values(), ids=LEFT_TO_DEFAULTS)
def test_what_is_left_to_defaults_comes_from_transformers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, sizes() | options)
    theirs = DecoderConfig.from_transformers(load_config(tmp_path))
    assert decoder_configs._complete(tmp_path) is None
    assert same(read_decoder_config(tmp_path), theirs)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama", "hidden_size": "wide"}'])
def test_a_broken_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_decoder_config(tmp_path)
