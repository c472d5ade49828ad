"""config.json of vLLM's raw layout, written and read: a Llama config with EAGLE-3's keys.

vLLM fills missing keys with defaults and ignores what it does not know, so every key that it
reads is written, and nothing that matters is guessed or ignored in reading.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from peagle.checkpoints.heads.layouts import OURS, object_at
from peagle.config import DEFAULT_SPECULATIVE_TOKENS, MAX_SPECULATIVE_TOKENS
from peagle.errors import HeadError

if TYPE_CHECKING:
    from peagle.models.head_config import HeadConfig

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps", "vocab_size"),
)
SWITCHES = (
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    *("attention_bias", "mlp_bias"),
)
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in the order vLLM looks
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Written under the key `peagle`, because the layout has no place for them.
OWN_FIELDS = (
    *("target_model", "target_num_hidden_layers", "max_position_embeddings"),
    *("max_speculative_tokens", "num_speculative_tokens", "has_embed_tokens", "has_lm_head"),
)
FULL, SLIDING = "full_attention", "sliding_attention"
UNNAMED_TARGET = "an unnamed target"  # the layout does not say whom a head is for
# Keys that change what a layer computes, and the one value that our layers compute.
ONLY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
    "is_causal": True,
    "bias": False,
    "qkv_bias": False,
    "quantization_config": None,
}


def write_options(
    config: HeadConfig, mask_token_id: int | None, max_position_embeddings: int
) -> dict[str, Any]:
    """The config.json. `max_position_embeddings` is what vLLM sizes its tables by."""
    layers = list(config.aux_hidden_state_layer_ids)
    options: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in (*SIZES, *SWITCHES)},
        "max_position_embeddings": max_position_embeddings,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "logit_scale": 1.0,
        "tie_word_embeddings": False,
        **_written_rope(config.rope_parameters),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(layers),
        LAYER_IDS: layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
            LAYER_IDS: layers,
        },
        OURS: {name: getattr(config, name) for name in OWN_FIELDS},
    }
    if config.sliding_window is not None:
        kinds = [SLIDING] * config.num_hidden_layers
        options |= {"sliding_window": config.sliding_window, "layer_types": kinds}
    if mask_token_id is not None:
        options |= dict.fromkeys(MASK_KEYS, mask_token_id)
    return options


def _written_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in transformers' present words, and in the former ones that older versions of
    vLLM read."""
    written = {"rope_parameters": dict(parameters), "rope_theta": parameters["rope_theta"]}
    if parameters.get("rope_type", "default") != "default":
        written["rope_scaling"] = dict(parameters)
    return written


def read_options(
    options: Mapping[str, Any], tensors: Collection[str], where: str
) -> dict[str, Any]:
    """The fields of HeadConfig. `tensors` are the stored names: own tables show there."""
    _refuse_other_networks(options, where)
    mask = _mask_token_id(options, where)
    fields: dict[str, Any] = {
        "method": "eagle3" if mask is None else "p-eagle",
        "mask_token_id": mask,
        "target_model": UNNAMED_TARGET,
        "target_num_hidden_layers": None,
        **{name: _needed(options, name, where) for name in SIZES},
        **{name: options.get(name, False) for name in SWITCHES},
        "rope_parameters": _rope(options, where),
        "sliding_window": _sliding_window(options, where),
        "num_speculative_tokens": DEFAULT_SPECULATIVE_TOKENS,
        "max_speculative_tokens": MAX_SPECULATIVE_TOKENS,  # the layout does not say
        "has_embed_tokens": "embed_tokens.weight" in tensors,
        "has_lm_head": "lm_head.weight" in tensors,
    }
    fields |= _following_sizes(options, fields)
    fields |= _eagle_fields(options, where)
    return fields | _own_fields(options, where)


def _refuse_other_networks(options: Mapping[str, Any], where: str) -> None:
    for name, value in ONLY.items():
        if options.get(name) not in (None, value):
            raise HeadError(
                f"{where}: {name}={options[name]!r} is not supported", hint=f"{value!r} is"
            )
    if object_at(options, "eagle_config", where).get("use_aux_hidden_state", True) is not True:
        raise HeadError(
            f"{where}: use_aux_hidden_state=false is not supported",
            hint="that is an EAGLE-1 head: it reads the last hidden state alone",
        )


def _sliding_window(options: Mapping[str, Any], where: str) -> Any:
    """Without `layer_types` vLLM lets every layer see everything, whatever window is named."""
    kinds = options.get("layer_types") or [FULL]
    known = kinds[0] if isinstance(kinds, list) else None
    if known not in (FULL, SLIDING) or kinds != [known] * len(kinds):
        hint = f"{FULL} or {SLIDING}, the same for all layers, is"
        raise HeadError(f"{where}: layer_types {kinds} are not supported", hint=hint)
    return None if known == FULL else _needed(options, "sliding_window", where)


def _needed(options: Mapping[str, Any], name: str, where: str, default: str = "") -> Any:
    if options.get(name) is None:
        hint = f"vLLM would silently take {default}" if default else "copy the folder again"
        raise HeadError(f"{where} lacks {name}", hint=hint)
    return options[name]


def _following_sizes(options: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Left out, these follow from others by transformers' rules; tensors' shapes check them."""
    size, heads = fields["hidden_size"], fields["num_attention_heads"]
    whole = type(size) is int and type(heads) is int and heads > 0
    follow = {
        "num_key_value_heads": heads,
        "target_hidden_size": size,
        "draft_vocab_size": fields["vocab_size"],
        "head_dim": size // heads if whole else None,
    }
    return {n: value if options.get(n) is None else options[n] for n, value in follow.items()}


def _mask_token_id(options: Mapping[str, Any], where: str) -> Any:
    given = {name: options[name] for name in MASK_KEYS if options.get(name) is not None}
    first = next(iter(given.values()), None)
    if any(value != first for value in given.values()):
        raise HeadError(f"{where} names several mask ids: {given}", hint="which one was trained?")
    return first


def _eagle_fields(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What may stand at the top or in `eagle_config`; in both, it must be the same."""
    nested = object_at(options, "eagle_config", where)
    found = {}
    for name in (LAYER_IDS, "norm_before_fc"):
        places = [p[name] for p in (options, nested) if p.get(name) is not None]
        if len(places) == 2 and places[0] != places[1]:
            raise HeadError(f"{where}: {name} is {places[0]}, but {places[1]} in eagle_config")
        if places:
            found[name] = places[0]
    layers = _needed(found, LAYER_IDS, where, "layers 2, L//2 and L-3 of the target")
    count = options.get("num_aux_hidden_states")
    if count is not None and isinstance(layers, list) and count != len(layers):
        raise HeadError(f"{where}: num_aux_hidden_states is {count}, {LAYER_IDS} are {layers}")
    return {
        "aux_hidden_state_layer_ids": layers,
        "norm_before_fc": found.get("norm_before_fc", False),
    }


def _rope(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """transformers wrote `rope_theta` and `rope_scaling` before it wrote `rope_parameters`."""
    former = object_at(options, "rope_scaling", where)
    parameters = dict(object_at(options, "rope_parameters", where) or former)
    if "rope_theta" not in parameters:
        parameters["rope_theta"] = _needed(options, "rope_theta", where, "10000")
    old_name = parameters.pop("type", "default")
    return {"rope_type": old_name, **parameters}


def _own_fields(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    own = object_at(options, OURS, where)
    unknown = sorted(set(own) - set(OWN_FIELDS))
    if unknown:
        raise HeadError(f"{where}: unknown key {unknown[0]!r} in {OURS}")
    return dict(own)
