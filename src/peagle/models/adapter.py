"""A target made of transformers' own modules, for the families that have no native one.

Two ways, chosen by a trial when the model is loaded:

paged       its attention reads and writes the engine's paged cache, so that batching, roll-back and
            trees are the engine's own. For models whose only memory is keys and values that pass
            through transformers' attention interface.
recomputed  the cache holds each sequence's token ids, and every step computes the whole prefix
            again. For all others: recurrent layers, convolutions, attention biases, embeddings that
            layers look up themselves. Exact, and slower the longer the text is.

Shapes: N rows, H hidden, h heads, g key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from peagle.errors import ModelError
from peagle.kernels.policy import FAST
from peagle.kernels.reference.attention import PLAIN, Scores, attend
from peagle.models.attention import Attention, CachedAttention
from peagle.models.config import DecoderConfig
from peagle.models.drafter import CacheLayout
from peagle.models.layers import at_least_float32
from peagle.models.target import TargetModel, TargetOutput

TRIAL_TOKENS = 11
TRIAL_CUT = 7  # the trial computes so many rows first, then the others
DEFAULT_CONTEXT = 8192  # of models that do not say how far they go
CHANGING_ROPES = ("dynamic", "longrope")
NEAR = 1e-3  # of two computations, relative to the largest value: far above rounding
# Of Gemma-3n and of Gemma-4's small models: each layer looks the tokens up in a table of its own.
PER_LAYER_INPUTS = "hidden_size_per_layer_input"
BASE, DIGITS = 256, 4  # of a token id in the cache: bfloat16 is exact up to 256


class TransformersTarget(TargetModel):
    captures = False  # transformers' code may ask the device for values

    def __init__(self, model: Any, config: DecoderConfig) -> None:
        nn.Module.__init__(self)
        self.policy, self._fused = FAST, None
        self.model = model  # a causal language model of transformers
        self.base = model.base_model
        self.embed_tokens = model.get_input_embeddings()
        self.lm_head = model.get_output_embeddings()
        self.config = config
        self._layers = _decoder_layers(self.base, config.num_hidden_layers)
        self._seam = AttentionSeam()
        self.rolls_back = True
        self.register_buffer("_digits", None, persistent=False)
        self._try_out()

    @property
    def changes_logits(self) -> bool:
        return True  # the output layer may have a bias

    @property
    def cache_layout(self) -> CacheLayout:
        if self.rolls_back:
            return super().cache_layout
        return CacheLayout(1, 1, DIGITS)

    @property
    def input_table(self) -> Tensor:
        return super().input_table if self._digits is None else self._digits

    def run(
        self,
        x: Tensor,  # [N, H], or [N, DIGITS]: rows of `input_table`
        positions: Tensor,  # [N]
        attention: Attention,
        aux_hidden_state_layers: Sequence[int] = (),
    ) -> TargetOutput:
        if self.rolls_back:
            x = x * self.config.embedding_scale if self.config.embedding_scale != 1.0 else x
            inputs = {"inputs_embeds": x[None], "position_ids": positions[None]}
            with self._seam.open(attention):
                return self._rows(aux_hidden_state_layers, **inputs)
        if not isinstance(attention, CachedAttention):
            raise ModelError(
                f"a {self.model.config.model_type} target cannot be evaluated or captured here",
                hint="it can generate; see docs/models.md",
            )
        parts = [
            self._end_of(prefix, count, aux_hidden_state_layers)
            for prefix, count in attention.prefixes(x)
        ]
        hidden = torch.cat([part.hidden for part in parts])
        aux = [part.aux_hidden_states for part in parts if part.aux_hidden_states is not None]
        return TargetOutput(hidden, torch.cat(aux) if aux else None)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.adjusted(at_least_float32(self.lm_head(hidden)))

    def _end_of(self, prefix: Tensor, count: int, layers: Sequence[int]) -> TargetOutput:
        """The last `count` rows of a sequence of token ids [T, DIGITS]."""
        hidden, aux = self._rows(layers, input_ids=_from_digits(prefix)[None])
        return TargetOutput(hidden[-count:], None if aux is None else aux[-count:])

    def _rows(self, layers: Sequence[int], **inputs: Tensor) -> TargetOutput:
        kept: dict[int, Tensor] = {}
        with _hooks(self._layers, layers, kept):
            output = self.base(**inputs, use_cache=False)
        hidden = output.last_hidden_state[0]
        aux = torch.cat([kept[i] for i in layers], dim=-1) if layers else None
        return TargetOutput(hidden, aux)

    @torch.no_grad()
    def _try_out(self) -> None:
        """Finds the scales of embeddings and logits, and whether the paged way is right."""
        device = self.embed_tokens.weight.device
        tokens = torch.arange(TRIAL_TOKENS, device=device) % self.config.vocab_size
        expected = self._logits_of(tokens)
        if not _near(self._logits_of(tokens[:TRIAL_CUT]), expected[:TRIAL_CUT]):
            raise _unknown(self.model, "a token's logits depend on the tokens behind it")
        self._find_output(tokens, expected)
        if not (self._find_embedding_scale(tokens) and self._is_paged(tokens, expected)):
            self.rolls_back = False
            table = _to_digits(torch.arange(self.config.vocab_size, device=device))
            self._digits = table.to(self.embed_tokens.weight.dtype)

    def _logits_of(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens[None], use_cache=False).logits[0]
        return logits

    def _is_paged(self, tokens: Tensor, expected: Tensor) -> bool:
        device = tokens.device
        own = self.model.config._attn_implementation
        attention, rows = _GrowingAttention(), torch.arange(len(tokens), device=device)
        try:
            self.model.set_attn_implementation(self._seam.name)
            parts = [slice(0, TRIAL_CUT), slice(TRIAL_CUT, None)]
            outputs = [self(tokens[part], rows[part], attention).hidden for part in parts]
            is_right = attention.was_called and _near(self.logits(torch.cat(outputs)), expected)
        except Exception:  # whatever a model makes of an attention that it was not written for
            is_right = False
        if is_right:
            heads, dim = attention.widest
            self.config = replace(self.config, num_key_value_heads=heads, head_dim=dim)
        else:
            self.model.set_attn_implementation(own)
        return is_right

    def _find_embedding_scale(self, tokens: Tensor) -> bool:
        """False where layers are fed by more than rows of a table and a scale."""
        if getattr(self.model.config.get_text_config(), PER_LAYER_INPUTS, None):
            return False
        rows, plain = self.embed_tokens(tokens), self.embed_tokens.weight[tokens]
        scale = float((rows * plain).sum() / (plain * plain).sum())
        if abs(scale - 1) > NEAR:
            self.config = replace(self.config, embedding_scale=scale)
        return _near(plain * scale, rows)

    def _find_output(self, tokens: Tensor, expected: Tensor) -> None:
        """How logits follow from the last hidden states: by a scale and a cap at most. And whether
        there are such states behind each layer."""
        hidden, aux = self._rows((1,), input_ids=tokens[None])
        # Gemma-3n's layers hand on several states of each token.
        self.has_hidden_states = aux is not None and aux.shape == hidden.shape
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        product = at_least_float32(self.lm_head(hidden))
        scale = float((expected * product).sum() / (product * product).sum()) if not cap else 1.0
        if abs(scale - 1) > NEAR or cap:
            self.config = replace(self.config, logit_scale=scale, logit_cap=cap)
        if not _near(self.logits(hidden), expected):
            raise _unknown(self.model, "logits are more than a product with a table")


class AttentionSeam:
    """Stands in transformers' registry for the attention of the step that runs."""

    def __init__(self) -> None:
        from transformers import AttentionInterface

        self._current: Attention | None = None
        self.name = f"peagle_{id(self)}"
        AttentionInterface.register(self.name, self)

    @contextmanager
    def open(self, attention: Attention) -> Iterator[None]:
        self._current = attention
        try:
            yield
        finally:
            self._current = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,  # [1, h, N, D]
        key: Tensor,  # [1, g, N, D]
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,  # of transformers: dropout and what its models hand through
    ) -> tuple[Tensor, None]:
        assert self._current is not None
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        layer: Any = module.layer_idx
        out = self._current(layer, q, k, v, sliding_window, Scores(scaling, softcap, s_aux))
        return out[None], None


class _GrowingAttention:
    """Of one sequence whose rows come in parts: for the trial."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def was_called(self) -> bool:
        return bool(self.cache)

    @property
    def widest(self) -> tuple[int, int]:
        """Heads and head dimension of the layer that keeps most."""
        rows = [part[0] for pair in self.cache.values() for part in pair]  # [g, D]
        heads, dim = max(rows, key=Tensor.numel).shape
        return heads, dim

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        if layer in self.cache:
            k, v = (torch.cat(pair) for pair in zip(self.cache[layer], (k, v), strict=True))
        self.cache[layer] = k, v
        key = torch.arange(len(k), device=k.device)
        distance = key[-len(q) :, None] - key
        visible = (distance >= 0) & (distance < (window or len(k)))
        return attend(q, k, v, visible, scores)


def adapted_config(config: Any) -> DecoderConfig:
    """What an engine and a head must know of any causal language model."""
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if not isinstance(getattr(config, name, None), int):
            raise ModelError(
                f"model type {config.model_type!r} is no causal language model: it has no {name}",
                hint="a target reads and writes text, token by token",
            )
    if changing := [kind for kind in _rope_types(config) if kind in CHANGING_ROPES]:
        raise ModelError(
            f"rope type {changing[0]!r} turns a token by the length of the text that follows it, "
            "so that drafts cannot be verified without changing the output",
            hint="use a checkpoint whose rope does not change with the length",
        )
    size = config.hidden_size
    heads = getattr(config, "num_attention_heads", None) or 1
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,  # until the trial has seen the keys
        head_dim=size // heads,
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        inverse_frequencies=torch.empty(0),  # the model's own affair
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
    )


def _rope_types(config: Any) -> list[str]:
    given = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in given.values() if isinstance(part, dict)]
    return [str(part.get("rope_type")) for part in (given, *nested)]


def _decoder_layers(base: nn.Module, count: int) -> nn.ModuleList:
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise _unknown(base, f"there is no list of {count} layers in it")


@contextmanager
def _hooks(layers: nn.ModuleList, wanted: Sequence[int], kept: dict[int, Tensor]) -> Iterator[None]:
    """Keeps the residual stream [N, H] after the first i layers, for each i that is wanted."""

    def before(_: nn.Module, args: Any, options: dict[str, Any]) -> None:
        kept[0] = (args[0] if args else options["hidden_states"])[0]

    def after(depth: int) -> Callable[..., None]:
        def keep(_: nn.Module, args: Any, output: Any) -> None:
            kept[depth] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep

    handles = [layers[i - 1].register_forward_hook(after(i)) for i in set(wanted) if i]
    if 0 in wanted:
        handles.append(layers[0].register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _to_digits(ids: Tensor) -> Tensor:
    """[N] -> [N, DIGITS], the lowest first."""
    powers = BASE ** torch.arange(DIGITS, device=ids.device)
    return ids[:, None] // powers % BASE


def _from_digits(digits: Tensor) -> Tensor:
    powers = BASE ** torch.arange(DIGITS, device=digits.device)
    return (digits.long() * powers).sum(-1)


def _near(ours: Tensor, theirs: Tensor) -> bool:
    ours, theirs = ours.float(), theirs.float()
    room = NEAR if theirs.dtype is torch.float32 else 0.05
    return bool((ours - theirs).abs().max() <= room * theirs.abs().max())


def _unknown(model: Any, why: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} does not run here: {why}", hint="serve it with --backend vllm"
    )
