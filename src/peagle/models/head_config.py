"""What a head's config.json says, and whether the head fits a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from peagle.errors import HeadError, ModelError
from peagle.models.config import DecoderConfig
from peagle.models.rope import rope_parameters
from peagle.speculation.trees import MAX_BEAM_DEPTH

HeadMethod = Literal["p-eagle", "eagle3"]


class TargetSizes(Protocol):
    """What a head must know of a target: our DecoderConfig has it, and so do transformers'."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes of the drafter and the promises it makes about its target.

    A head with `has_embed_tokens` or `has_lm_head` false is compact: it uses the target's table.
    """

    method: HeadMethod
    target_model: str  # the reference it was trained for, for messages alone
    target_hidden_size: int
    target_num_hidden_layers: int | None  # None: a foreign layout does not say
    vocab_size: int  # the target's
    aux_hidden_state_layer_ids: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]  # as transformers writes them
    draft_vocab_size: int
    max_speculative_tokens: int  # the deepest draft it was trained for
    num_speculative_tokens: int  # the K its makers advise
    has_embed_tokens: bool = False
    has_lm_head: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False  # EAGLE-3: the normed hidden state is fed back
    norm_before_fc: bool = False  # one norm over the concatenated aux_hidden_states
    fc_norm: bool = False  # one norm for each aux hidden state
    attention_bias: bool = False  # q, k, v and o have biases
    mlp_bias: bool = False
    mask_token_id: int | None = None  # where an exported table keeps the mask embedding
    correction_size: int | None = None  # width of models/correction.py; None: it has none
    sliding_window: int | None = None  # positions that a row sees, its own included; None: all

    def __post_init__(self) -> None:
        if self.method not in get_args(HeadMethod):
            raise HeadError(
                f"method {self.method!r} is unknown", hint=f"use {', '.join(get_args(HeadMethod))}"
            )
        sizes = (
            "target_hidden_size target_num_hidden_layers vocab_size hidden_size intermediate_size "
            "num_hidden_layers num_attention_heads num_key_value_heads head_dim "
            "max_position_embeddings draft_vocab_size max_speculative_tokens correction_size "
            "sliding_window"
        )
        for name in sizes.split():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise HeadError(f"{name} {value} is not positive")
        if self.num_attention_heads % self.num_key_value_heads:
            raise HeadError(
                f"{self.num_attention_heads} attention heads cannot share "
                f"{self.num_key_value_heads} key-value heads evenly"
            )
        if self.correction_size is not None and self.method != "p-eagle":
            raise HeadError("correction_size belongs to p-eagle heads: others draft in sequence")
        if self.sliding_window is not None and self.sliding_window < MAX_BEAM_DEPTH:
            raise HeadError(
                f"sliding_window {self.sliding_window} is less than a tree's depth",
                hint=f"use {MAX_BEAM_DEPTH} or more",
            )
        if not self.aux_hidden_state_layer_ids:
            raise HeadError("aux_hidden_state_layer_ids is empty")
        if "rope_theta" not in self.rope_parameters:  # no silent default
            raise HeadError("rope_parameters lacks rope_theta")
        if self.draft_vocab_size > self.vocab_size:
            raise HeadError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds the target's vocabulary",
                hint=f"use at most {self.vocab_size}",
            )
        if not 1 <= self.num_speculative_tokens <= self.max_speculative_tokens:
            raise HeadError(
                f"num_speculative_tokens {self.num_speculative_tokens} is out of range",
                hint=f"use 1 to {self.max_speculative_tokens}, which is max_speculative_tokens",
            )

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    @property
    def reach(self) -> int | None:
        """Rows before a row that its state depends on, through all layers; None: all."""
        window = self.sliding_window
        return None if window is None else self.num_hidden_layers * (window - 1)

    def decoder(self) -> DecoderConfig:
        window = self.sliding_window
        try:
            inverse_frequencies, rope_scale = rope_parameters(
                self.rope_parameters,
                head_dim=self.head_dim,
                max_position_embeddings=self.max_position_embeddings,
            )
        except ModelError as error:
            reason = error.message.removeprefix("cannot use rope_parameters ")
            raise HeadError(f"cannot use rope_parameters: {reason}", hint=error.hint) from error
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            inverse_frequencies=inverse_frequencies,
            rope_scale=rope_scale,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            sliding_windows=() if window is None else (window,) * self.num_hidden_layers,
        )

    def check_fits(self, target: TargetSizes) -> None:
        """Raises HeadError with every mismatch named, rather than drafting nonsense."""
        pairs = [
            ("hidden size", self.target_hidden_size, target.hidden_size),
            ("vocabulary", self.vocab_size, target.vocab_size),
            ("number of layers", self.target_num_hidden_layers, target.num_hidden_layers),
        ]
        wrong = [
            f"{name} {ours} but the target has {its}"
            for name, ours, its in pairs
            if ours is not None and ours != its
        ]
        if not wrong and not all(
            0 <= i <= target.num_hidden_layers for i in self.aux_hidden_state_layer_ids
        ):
            wrong.append(f"layer ids {list(self.aux_hidden_state_layer_ids)} out of the target's")
        borrows = not (self.has_embed_tokens and self.has_lm_head)
        if not wrong and borrows and self.hidden_size != target.hidden_size:
            wrong.append(
                f"it borrows the target's tables, {target.hidden_size} wide, "
                f"but is {self.hidden_size} wide"
            )
        if wrong:
            raise HeadError(
                f"this head was made for {self.target_model}: {'; '.join(wrong)}",
                hint="use the target it was trained for, or train a head with `peagle train`",
            )
