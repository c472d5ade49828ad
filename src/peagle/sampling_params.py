"""How one request is sampled: vLLM's names, vLLM's meanings, checked on construction."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from peagle.compatibility import SAMPLING_ARGUMENTS, drop_unused
from peagle.config import Doc
from peagle.errors import RequestError

# Below this a softmax in float32 is an argmax with overflow risk; vLLM draws the line here too.
GREEDY_TEMPERATURE = 1e-5
# The device's numbers are float32: there a smaller top_p is 0, which keeps no token at all, and a
# larger temperature infinite, which makes the logit of a forbidden token NaN.
SMALLEST, LARGEST = 1.2e-38, 3.4e38
# Below this, logits that are divided by it come near the largest number.
MIN_REPETITION_PENALTY = 1e-3
MAX_LOGPROBS = 1024
MAX_GRAMMAR_CHARACTERS = 1 << 16
MAX_CHOICES = 4096

# The fields of StructuredOutputsParams of which one says what an answer looks like.
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must look like: exactly one of json, regex, choice, grammar, json_object."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema, or its text
    regex: str | None = None  # of the whole answer
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    json_object: bool | None = None  # any JSON object
    disable_any_whitespace: bool = False  # JSON without whitespace between its tokens
    whitespace_pattern: str | None = None  # a regex: the whitespace that JSON may have

    def __post_init__(self) -> None:
        if len(self._given) != 1:
            said = " and ".join(self._given) or "none"
            raise RequestError(
                f"structured_outputs takes one of {', '.join(CONSTRAINTS)}, but has {said}",
                hint="give exactly one",
            )
        _check_grammar(self)

    @property
    def kind(self) -> str:
        """Which of CONSTRAINTS it has."""
        return self._given[0]

    @property
    def text(self) -> str:
        """The constraint as text, a JSON schema with its keys in their order."""
        if self.kind == "json_object":
            return '{"type": "object"}'
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)

    @property
    def _given(self) -> list[str]:
        return [name for name in CONSTRAINTS if getattr(self, name) not in (None, False, "")]


_Params = TypeVar("_Params")


def _takes_vllms_arguments(cls: type[_Params]) -> type[_Params]:
    """Lets the constructor take what vLLM's takes: see `compatibility`, and None for no list."""
    own = cls.__init__

    @functools.wraps(own)
    def init(self: _Params, **given: Any) -> None:
        known = drop_unused(given, SAMPLING_ARGUMENTS, RequestError)
        lists = ("stop", "stop_token_ids", "logit_bias", "bad_words")
        own(self, **{k: v for k, v in known.items() if v is not None or k not in lists})

    cls.__init__ = init  # type: ignore[assignment, method-assign]
    return cls


@_takes_vllms_arguments
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. Every combination is lossless under speculation.

    `num_speculative_tokens` and `num_draft_nodes` are ours: None takes the engine's, 0 turns
    speculation off for this request, less asks for fewer drafts. With speculation auto they are
    limits.
    """

    n: Annotated[int, Doc("Number of answers per prompt.")] = 1
    temperature: Annotated[float, Doc("0 is greedy decoding, 1 the model's own distribution.")] = (
        1.0
    )
    top_k: Annotated[int, Doc("Sample from the K most likely tokens; 0 or -1: all.")] = 0
    top_p: Annotated[float, Doc("Sample from the likeliest tokens that add up to P.")] = 1.0
    min_p: Annotated[float, Doc("Drop tokens below this share of the likeliest one.")] = 0.0
    repetition_penalty: Annotated[float, Doc("Above 1 discourages repetition.")] = 1.0
    presence_penalty: Annotated[float, Doc("Penalty for every token that was used.")] = 0.0
    frequency_penalty: Annotated[float, Doc("Penalty for each time a token was used.")] = 0.0
    logit_bias: Annotated[Mapping[int, float], Doc('Added to logits: {"42": -100}.')] = field(
        default_factory=dict
    )
    bad_words: Annotated[Sequence[str], Doc("Words that answers must not contain.")] = ()
    min_tokens: Annotated[int, Doc("Minimum length of an answer, in tokens.")] = 0
    max_tokens: Annotated[
        int | None,
        Doc("Maximum length of an answer, in tokens.", if_none="up to the context length"),
    ] = 16
    seed: Annotated[int | None, Doc("The same seed gives the same answer.")] = None
    stop: Annotated[str | Sequence[str], Doc("Text that ends an answer.")] = ()
    stop_token_ids: Annotated[Sequence[int], Doc("Token id that ends an answer.")] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: Annotated[bool, Doc("Continue past the end-of-sequence token.")] = False
    # None: none; 0: the sampled token's alone.
    logprobs: Annotated[int | None, Doc("Log-probabilities of the N likeliest tokens.")] = None
    skip_special_tokens: bool = True
    num_speculative_tokens: int | None = None
    num_draft_nodes: int | None = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None,
        Doc('What answers look like: {"json": SCHEMA}, {"regex": ...}, {"choice": [...]} ...'),
    ] = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _check_numbers(self)
        _check_lists(self)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _check_numbers(p: SamplingParams) -> None:
    _require(p.n >= 1, "n", p.n, "1 or more")
    _require(0.0 <= p.temperature <= LARGEST, "temperature", p.temperature, "0 or more")
    _require(p.top_k >= -1, "top_k", p.top_k, "0 or -1 for all tokens, or a positive count")
    _require(SMALLEST <= p.top_p <= 1.0, "top_p", p.top_p, "a value in (0, 1]")
    _require(0.0 <= p.min_p <= 1.0, "min_p", p.min_p, "a value in [0, 1]")
    _require(
        MIN_REPETITION_PENALTY <= p.repetition_penalty <= 2.0,
        "repetition_penalty",
        p.repetition_penalty,
        f"a value in [{MIN_REPETITION_PENALTY}, 2]",
    )
    for name, value in (
        ("presence_penalty", p.presence_penalty),
        ("frequency_penalty", p.frequency_penalty),
    ):
        _require(-2.0 <= value <= 2.0, name, value, "a value in [-2, 2]")
    _require(p.min_tokens >= 0, "min_tokens", p.min_tokens, "0 or more")
    if p.max_tokens is not None:
        _require(p.max_tokens >= 1, "max_tokens", p.max_tokens, "1 or more")
        if p.min_tokens > p.max_tokens:
            raise RequestError(
                f"min_tokens={p.min_tokens} is more than max_tokens={p.max_tokens}",
                hint="lower min_tokens or raise max_tokens",
            )
    if p.logprobs is not None:
        _require(
            0 <= p.logprobs <= MAX_LOGPROBS,
            "logprobs",
            p.logprobs,
            f"a value in [0, {MAX_LOGPROBS}]",
        )
    for name, count in (
        ("num_speculative_tokens", p.num_speculative_tokens),
        ("num_draft_nodes", p.num_draft_nodes),
    ):
        _require(count is None or count >= 0, name, count, "0 (off for this request) or more")
    if p.structured_outputs is not None and p.ignore_eos:
        raise RequestError(
            "structured_outputs and ignore_eos contradict each other",
            hint="a grammar says where the answer ends: drop ignore_eos",
        )
    if p.greedy and p.n > 1:
        raise RequestError(
            f"n={p.n} with temperature=0 would return the same answer {p.n} times",
            hint="set a temperature above 0, or n=1",
        )


def _check_lists(p: SamplingParams) -> None:
    if any(not s for s in p.stop_strings):
        raise RequestError("stop contains an empty string", hint="remove it")
    if any(not word.strip() for word in p.bad_words):
        raise RequestError("bad_words contains an empty word", hint="remove it")
    for token_id, bias in p.logit_bias.items():
        if not (isinstance(token_id, int) and token_id >= 0):
            raise RequestError(f"logit_bias key {token_id!r} is not a token id")
        if not -100.0 <= bias <= 100.0:
            raise RequestError(
                f"logit_bias of token {token_id} is {bias}", hint="use a value in [-100, 100]"
            )


def _check_grammar(p: StructuredOutputsParams) -> None:
    if p.kind == "json":
        _check_schema(p.json)
    elif p.kind == "choice":
        _check_choice(p.choice or ())
    elif p.kind != "json_object" and not isinstance(getattr(p, p.kind), str):
        raise RequestError(f"{p.kind} is not a text")
    if len(p.text) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"{p.kind} has {len(p.text)} characters", hint=f"use at most {MAX_GRAMMAR_CHARACTERS}"
        )
    is_json = p.kind in ("json", "json_object")
    if p.whitespace_pattern is not None and (p.disable_any_whitespace or not is_json):
        raise RequestError(
            "whitespace_pattern has no effect here",
            hint="use it with json or json_object, and without disable_any_whitespace",
        )


def _check_schema(schema: object) -> None:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json is not valid JSON: {error}", hint="give a JSON schema") from None
    if not isinstance(value, Mapping):
        raise RequestError("json is not a JSON schema", hint='use {"type": "object", ...}')


def _check_choice(choice: Sequence[str]) -> None:
    if isinstance(choice, str) or not all(isinstance(text, str) and text for text in choice):
        raise RequestError("choice is not a list of texts", hint='use ["yes", "no"]')
    if not 0 < len(choice) <= MAX_CHOICES:
        raise RequestError(f"choice has {len(choice)} texts", hint=f"use 1 to {MAX_CHOICES}")


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{name}={value} is out of range", hint=f"use {allowed}")
