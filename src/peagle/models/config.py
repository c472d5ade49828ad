"""What a decoder is made of, read once from a transformers config.

A Llama is the default of every switch. `DecoderConfig.has_standard_layers` says whether the layers
are such that the fused kernels know them; other layers run by their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from peagle.errors import ModelError
from peagle.kernels.reference.experts import MXFP4, LowBitForm
from peagle.models.rope import rope_parameters

Activation = Literal["silu", "gelu_pytorch_tanh"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_pytorch_tanh")
# How a norm applies its weight: to the rounded rows; before they are rounded; as 1 + weight.
NormKind = Literal["rounded", "float32", "one_plus"]
# Where a layer norms: what its two parts read, what they give, or both.
NormPlaces = Literal["before", "after", "around"]
# The weights of a row's experts: of all probabilities, the best ones as they are or so that they
# add up to 1; or the softmax of the best logits alone.
RouterKind = Literal["softmax", "normalised", "softmax_of_best"]
FP8_BLOCK_INPUTS = (16, 32, 64, 128)  # what one turn of the low-bit product takes


class Rope(NamedTuple):
    inverse_frequencies: Tensor  # [R / 2] of the R dimensions that turn
    scale: float = 1.0  # of cos and sin: yarn's


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    router: RouterKind
    bias: bool = False  # of the router and of the experts
    clamp: float | None = None  # GPT-OSS: gate and up are clamped, then (up + 1) * swish(gate)
    swish_gain: float = 1.0
    beside_mlp: bool = False  # Gemma-4: a dense MLP and the experts, each with norms of its own
    low_bit: LowBitForm | None = None  # as the checkpoint stores them; None: as plain numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionConfig:
    """What may differ between a layer with a sliding window and one without."""

    num_key_value_heads: int
    head_dim: int
    rope: Rope
    value_is_key: bool = False  # there is no v_proj: values are the keys before norm and rotation


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    inverse_frequencies: Tensor  # [R / 2] of the R dimensions that turn: head_dim as a rule
    rope_scale: float = 1.0  # yarn scales cos and sin
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] = ()  # per layer; empty: full attention everywhere
    # Layers without a window where they are another kind of attention; None: all are alike.
    full_attention: AttentionConfig | None = None
    activation: Activation = "silu"
    norm: NormKind = "rounded"
    norm_places: NormPlaces = "before"
    norms_all_heads: bool = False  # qk_norm: all heads of a row together, not each
    value_norm: bool = False  # values are normed, too, without a weight
    query_scale: float | None = None  # None: head_dim ** -0.5
    score_cap: float | None = None  # attention scores s become cap * tanh(s / cap)
    sinks: bool = False  # each head has a learned score that no key stands behind
    experts: ExpertsConfig | None = None
    dense_layers: frozenset[int] = frozenset()  # layers without experts
    layer_scalar: bool = False  # a layer's output is multiplied by a learned number
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each part of a layer adds
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits x become cap * tanh(x / cap)

    def sliding_window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    @property
    def rope(self) -> Rope:
        return Rope(self.inverse_frequencies, self.rope_scale)

    def is_full(self, layer: int) -> bool:
        """Whether the layer is of the kind `full_attention`."""
        return self.full_attention is not None and self.sliding_window(layer) is None

    def attention(self, layer: int) -> AttentionConfig:
        if self.full_attention is not None and self.sliding_window(layer) is None:
            return self.full_attention
        return AttentionConfig(
            num_key_value_heads=self.num_key_value_heads, head_dim=self.head_dim, rope=self.rope
        )

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        return None if layer in self.dense_layers else self.experts

    @property
    def weights_per_row(self) -> int:
        """Weights that a row is multiplied with in all layers: of experts, those of its own."""
        return sum(self._layer_weights(layer) for layer in range(self.num_hidden_layers))

    def _layer_weights(self, layer: int) -> int:
        attention, experts = self.attention(layer), self.experts_of(layer)
        heads = 2 * self.num_attention_heads + 2 * attention.num_key_value_heads
        inner = 0 if experts is None else experts.top_k * experts.intermediate_size
        if experts is None or experts.beside_mlp:
            inner += self.intermediate_size
        return self.hidden_size * (heads * attention.head_dim + 3 * inner)

    @property
    def largest_kv_row(self) -> tuple[int, int]:
        """Key-value heads and head dimension of the layer whose keys are widest."""
        sizes = [(self.num_key_value_heads, self.head_dim)]
        if self.full_attention is not None:
            sizes.append((self.full_attention.num_key_value_heads, self.full_attention.head_dim))
        return max(sizes, key=lambda size: size[0] * size[1])

    @property
    def has_standard_layers(self) -> bool:
        """Whether kernels/layer_tensors.py can describe the layers."""
        plain = (self.norm, self.norm_places, self.activation) == ("rounded", "before", "silu")
        plain_scores = self.query_scale is None and self.score_cap is None and not self.sinks
        whole_heads = 2 * len(self.inverse_frequencies) == self.head_dim
        return (
            plain
            and plain_scores
            and whole_heads
            and self.full_attention is None
            and self.experts is None
            and self.residual_scale == 1.0
            and not (self.norms_all_heads or self.value_norm or self.layer_scalar)
        )

    @property
    def changes_logits(self) -> bool:
        """Whether logits are more than the product with the output table."""
        return self.logit_scale != 1.0 or self.logit_cap is not None

    @classmethod
    def sizes_of(cls, config: Any, rope: Mapping[str, Any] | None = None) -> DecoderConfig:
        """What every family says in the same words; its own habits are left at their defaults."""
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        inverse_frequencies, rope_scale = rope_parameters(
            config.rope_parameters or {} if rope is None else rope,
            head_dim=head_dim,
            max_position_embeddings=config.max_position_embeddings,
            partial=config.model_type in PARTIAL_ROPE,
        )
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            inverse_frequencies=inverse_frequencies,
            rope_scale=rope_scale,
            tie_word_embeddings=config.tie_word_embeddings,
        )

    @classmethod
    def from_transformers(cls, config: Any) -> DecoderConfig:
        family = config.model_type
        if family not in FAMILIES:
            raise ModelError(
                f"model type {family!r} has no native implementation",
                hint=f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}",
            )
        decoder = FAMILIES[family](config)
        return decoder.with_experts_as(_low_bit_form(decoder, config))

    def with_experts_as(self, form: LowBitForm | None) -> DecoderConfig:
        if self.experts is None:
            return self
        return replace(self, experts=replace(self.experts, low_bit=form))


def _low_bit_form(decoder: DecoderConfig, config: Any) -> LowBitForm | None:
    """Of the experts, as the config says it. None where kernels have no such form, or some of a
    block's numbers would be gates and some ups."""
    given = getattr(config, "quantization_config", None)
    if decoder.experts is None or not isinstance(given, Mapping):
        return None
    inner, block = decoder.experts.intermediate_size, given.get("weight_block_size")
    if given.get("quant_method") == "mxfp4":
        fits = decoder.hidden_size % MXFP4.inputs == inner % MXFP4.inputs == 0
        return MXFP4 if fits else None
    if given.get("quant_method") == "fp8" and isinstance(block, list | tuple) and len(block) == 2:
        outputs, inputs = map(int, block)
        fits = inner % outputs == 0 and inputs in FP8_BLOCK_INPUTS
        return LowBitForm("fp8", outputs, inputs) if fits else None
    return None


def head_rope(config: Any) -> dict[str, Any]:
    """The rope parameters of a head for this target: those of the layers that see everything.

    Gemma-4's turn a quarter of each head; a head turns all of it, with the same base.
    """
    given = dict(config.rope_parameters)
    if "full_attention" in given:
        given = dict(given["full_attention"])
    if given.get("rope_type") == "proportional":
        return {"rope_type": "default", "rope_theta": given["rope_theta"]}
    return given


def _llama(config: Any) -> DecoderConfig:
    return replace(
        _pre_norm(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def _mistral(config: Any) -> DecoderConfig:
    """One window for all layers."""
    windows = (config.sliding_window,) * config.num_hidden_layers
    return replace(_pre_norm(config), sliding_windows=windows if config.sliding_window else ())


def _qwen2(config: Any) -> DecoderConfig:
    return replace(_pre_norm(config), qkv_bias=True, sliding_windows=_sliding_windows(config))


def _qwen3(config: Any) -> DecoderConfig:
    return replace(
        _pre_norm(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
        sliding_windows=_sliding_windows(config),
    )


def _qwen3_moe(config: Any) -> DecoderConfig:
    experts = ExpertsConfig(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        router="normalised" if config.norm_topk_prob else "softmax",
    )
    layers = range(config.num_hidden_layers)
    sparse = {i for i in layers if (i + 1) % config.decoder_sparse_step == 0}
    dense = frozenset(layers) - sparse | frozenset(config.mlp_only_layers)
    windows = (config.sliding_window,) * len(layers) if config.sliding_window else ()
    return replace(
        _pre_norm(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
        sliding_windows=windows,
        experts=experts,
        dense_layers=dense,
    )


def _mixtral(config: Any) -> DecoderConfig:
    experts = ExpertsConfig(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        router="normalised",
    )
    return replace(_mistral(config), experts=experts)


def _gpt_oss(config: Any) -> DecoderConfig:
    experts = ExpertsConfig(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        router="softmax_of_best",
        bias=True,
        clamp=getattr(config, "swiglu_limit", 7.0),  # constants of older transformers' code
        swish_gain=getattr(config, "swiglu_alpha", 1.702),
    )
    return replace(
        _pre_norm(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        norm="float32",
        sinks=True,
        sliding_windows=_sliding_windows(config),
        experts=experts,
    )


def _phi3(config: Any) -> DecoderConfig:
    return _mistral(config)


def _granite(config: Any) -> DecoderConfig:
    return replace(
        _llama(config),
        query_scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1.0 / config.logits_scaling,
    )


def _olmo2(config: Any) -> DecoderConfig:
    return replace(
        _pre_norm(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
        norms_all_heads=True,
        norm="float32",
        norm_places="after",
    )


def _gemma2(config: Any) -> DecoderConfig:
    return replace(
        _gemma(config, DecoderConfig.sizes_of(config)),
        score_cap=config.attn_logit_softcapping,
        query_scale=config.query_pre_attn_scalar**-0.5,
        norm="one_plus",
    )


def _gemma3(config: Any) -> DecoderConfig:
    """Its attn_logit_softcapping is never used, neither by transformers."""
    rope = config.rope_parameters
    sizes = DecoderConfig.sizes_of(config, rope["sliding_attention"])
    full = DecoderConfig.sizes_of(config, rope["full_attention"])
    return replace(
        _gemma(config, sizes),
        full_attention=full.attention(0),
        query_scale=config.query_pre_attn_scalar**-0.5,
        norm="one_plus",
        qk_norm=True,
    )


def _gemma4(config: Any) -> DecoderConfig:
    extras = {
        "hidden_size_per_layer_input": "per-layer embeddings",
        "num_kv_shared_layers": "layers that share keys and values",
    }
    for name, what in extras.items():
        if getattr(config, name):
            raise ModelError(
                f"the native Gemma-4 has no {what} ({name}={getattr(config, name)})",
                hint="the dense 31B and the 26B-A4B are native",
            )
    kinds = {
        kind: DecoderConfig.sizes_of(config.per_layer_config[kind], config.rope_parameters[kind])
        for kind in set(config.layer_types)
    }
    full = kinds["full_attention"]  # the last layer, at least, is of this kind
    sizes = kinds.get("sliding_attention", full)
    experts = None
    if config.enable_moe_block:
        experts = ExpertsConfig(
            num_experts=config.num_experts,
            top_k=config.top_k_experts,
            intermediate_size=config.moe_intermediate_size,
            router="normalised",
            beside_mlp=True,
        )
    return replace(
        _gemma(config, sizes),
        full_attention=replace(full.attention(0), value_is_key=config.attention_k_eq_v),
        query_scale=1.0,
        norm="float32",
        qk_norm=True,
        value_norm=True,
        layer_scalar=True,
        experts=experts,
    )


def _gemma(config: Any, sizes: DecoderConfig) -> DecoderConfig:
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise ModelError(
            "a model with bidirectional attention does not generate text token by token"
        )
    return replace(
        sizes,
        activation=_activation(config.hidden_activation),
        norm_places="around",
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        sliding_windows=_sliding_windows(config),
        embedding_scale=config.hidden_size**0.5,
        logit_cap=config.final_logit_softcapping,
    )


def _pre_norm(config: Any) -> DecoderConfig:
    return replace(DecoderConfig.sizes_of(config), activation=_activation(config.hidden_act))


def _activation(name: str) -> Activation:
    for known in ACTIVATIONS:
        if name == known:
            return known
    raise ModelError(
        f"activation {name!r} is not supported", hint=f"supported: {', '.join(ACTIVATIONS)}"
    )


def _sliding_windows(config: Any) -> tuple[int | None, ...]:
    window = config.sliding_window
    if window is None:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


# Families whose heads may turn in part; elsewhere transformers takes no notice of the factor.
PARTIAL_ROPE = ("phi3",)
FAMILIES: dict[str, Callable[[Any], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "granite": _granite,
}
SUPPORTED_MODEL_TYPES = tuple(FAMILIES)
