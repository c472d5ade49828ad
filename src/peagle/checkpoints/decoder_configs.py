"""A target's config.json -> the sizes of its decoder.

A file that says everything is read as it is, for importing transformers takes a second or more.
One that leaves something to the defaults of its family goes through transformers' own classes.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peagle.checkpoints.files import read_json
from peagle.checkpoints.references import load_config
from peagle.errors import ModelError
from peagle.models.config import DecoderConfig

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# Families that are read without transformers; what others leave out, their classes know.
READ_DIRECTLY = ("llama", "mistral", "qwen2", "qwen3")
# Families whose heads are hidden_size / num_attention_heads wide where they do not say.
DERIVED_HEAD_DIM = ("llama", "mistral", "qwen2")
# transformers moves these into the rope parameters, by rules of its own.
ROPE_KEYS_OUTSIDE = ("original_max_position_embeddings", "partial_rotary_factor")


def read_decoder_config(folder: Path) -> DecoderConfig:
    return DecoderConfig.from_transformers(_complete(folder) or load_config(folder))


def _complete(folder: Path) -> SimpleNamespace | None:
    """The config with what DecoderConfig asks for; None if a default would have to be known."""
    try:
        options = read_json(folder / "config.json")
    except ModelError:
        return None  # transformers says what is wrong with it
    family, heads = options.get("model_type"), options.get("head_dim")
    rope, window = _rope(options), _window(options)
    is_complete = (
        family in READ_DIRECTLY
        and all(type(options.get(name)) is int and options[name] > 0 for name in SIZES)
        and options["hidden_size"] % options["num_attention_heads"] == 0
        and (type(heads) is int or (heads is None and family in DERIVED_HEAD_DIM))
        and type(options.get("rms_norm_eps")) is float
        and type(options.get("hidden_act")) is str
        and type(options.get("tie_word_embeddings")) is bool
        and all(type(options.get(name, False)) is bool for name in ("attention_bias", "mlp_bias"))
        and rope is not None
        and window != "unknown"
    )
    if not is_complete:
        return None
    switches = {name: options.get(name, False) for name in ("attention_bias", "mlp_bias")}
    known = {name: options[name] for name in (*SIZES, "rms_norm_eps", "hidden_act")}
    return SimpleNamespace(
        model_type=family,
        head_dim=heads,
        tie_word_embeddings=options["tie_word_embeddings"],
        rope_parameters=rope,
        sliding_window=window,
        **known,
        **switches,
    )


def _rope(options: dict[str, Any]) -> dict[str, Any] | None:
    """The rope parameters in transformers' present words; None if they do not name all."""
    if any(name in options for name in ROPE_KEYS_OUTSIDE):
        return None
    given = options.get("rope_scaling") or options.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(v, dict) for v in given.values()):
        return None
    theta = given.get("rope_theta", options.get("rope_theta"))
    if type(theta) not in (int, float):
        return None
    return {"rope_type": given.get("type", "default"), **given, "rope_theta": theta}


def _window(options: dict[str, Any]) -> int | str | None:
    """The sliding window; "unknown" where it is not given or not every layer has it."""
    family = options.get("model_type")
    if family == "llama":
        return None
    if family == "mistral":
        window = options.get("sliding_window", "unknown")
        return window if window is None or type(window) is int else "unknown"
    return None if options.get("use_sliding_window") is False else "unknown"
