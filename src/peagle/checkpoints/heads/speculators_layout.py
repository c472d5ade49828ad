"""config.json of the speculators layout: vLLM's options, parted, and whom the head is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peagle.checkpoints.heads.layouts import OURS, object_at
from peagle.checkpoints.heads.vllm_layout import LAYER_IDS
from peagle.errors import HeadError

MODEL_TYPES = {"p-eagle": "peagle", "eagle3": "eagle3"}
ARCHITECTURES = {"peagle": "PEagleSpeculator", "eagle3": "Eagle3Speculator"}
# What the layout keeps at the top. The rest of vLLM's options describe layers; the switches stand
# in both places, because vLLM reads some of them (fc_norm of a P-EAGLE head) from the layers alone.
TOP = (
    *("draft_vocab_size", "target_hidden_size", LAYER_IDS, "mask_token_id"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", OURS),
)
NOT_OF_LAYERS = ("architectures", "mask_token_id", "ptd_token_id", "pard_token", OURS)
VERSION = "0.9.0"  # the release whose files we follow


def wrap(
    options: Mapping[str, Any], method: str, num_speculative_tokens: int, verifier: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's options -> config.json. There is no top-level model_type: vLLM looks at it first."""
    model_type = MODEL_TYPES[method]
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "speculators_model_type": model_type,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": model_type,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        **{name: options[name] for name in TOP if name in options},
        "transformer_layer_config": {
            name: value for name, value in options.items() if name not in NOT_OF_LAYERS
        },
    }


def unwrap(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """config.json -> vLLM's options, as vLLM itself puts them together."""
    model_type = options.get("speculators_model_type")
    if model_type not in ARCHITECTURES:
        raise HeadError(
            f"{where}: speculators_model_type {model_type!r} is not supported",
            hint=f"supported: {', '.join(ARCHITECTURES)}",
        )
    layers = object_at(options, "transformer_layer_config", where)
    if "model_type" not in layers:
        raise HeadError(f"{where} lacks transformer_layer_config with its model_type")
    flat = {name: value for name, value in layers.items() if name not in NOT_OF_LAYERS}
    flat |= {name: options[name] for name in TOP if options.get(name) is not None}
    _refuse_guesses(flat, model_type, where)
    advice = {**_advice(options, where), **object_at(flat, OURS, where)}
    if isinstance(options.get("num_depths"), int):  # older releases write what was trained
        advice.setdefault("max_speculative_tokens", options["num_depths"])
    return {**flat, OURS: advice}


def _refuse_guesses(flat: Mapping[str, Any], model_type: str, where: str) -> None:
    if "draft_vocab_size" not in flat:
        raise HeadError(f"{where} lacks draft_vocab_size")
    is_parallel = model_type == "peagle"
    if is_parallel != ("mask_token_id" in flat):
        wrong = "lacks mask_token_id" if is_parallel else "is eagle3, but has a mask_token_id"
        raise HeadError(f"{where} {wrong}")
    if not is_parallel and "norm_before_residual" not in flat:
        hint = "vLLM would silently take true, the speculators library false"
        raise HeadError(f"{where} lacks norm_before_residual", hint=hint)


def _advice(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        spec = options["speculators_config"]
        tokens = spec["proposal_methods"][0]["speculative_tokens"]
        verifier = spec["verifier"]["name_or_path"]
    except (KeyError, IndexError, TypeError) as error:
        hint = "it needs proposal_methods[0].speculative_tokens and verifier.name_or_path"
        raise HeadError(f"{where}: speculators_config is not complete", hint=hint) from error
    named = {} if verifier is None else {"target_model": verifier}
    return {"num_speculative_tokens": tokens, **named}
