"""A request's body as SamplingParams, within the server's limits."""

from __future__ import annotations

from typing import Any

from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams, StructuredOutputsParams
from peagle.server.config import ServerConfig
from peagle.server.errors import ApiError
from peagle.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    NamedTool,
    SamplingBody,
)
from peagle.server.tool_calls import call_schema

# The same in a body and in SamplingParams; null is the default of SamplingParams.
SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "bad_words", "min_tokens", "seed", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
)
MAX_STOP_CHARACTERS = 1024
MAX_LIST = 1024  # token ids that end an answer or have a bias


def completion_params(body: CompletionRequest, config: ServerConfig) -> SamplingParams:
    if body.suffix:
        raise ApiError(400, "suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of is not supported", param="best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported", param="echo")
    values: dict[str, Any] = {"logprobs": body.logprobs}
    if body.max_tokens is not None:
        values["max_tokens"] = body.max_tokens
    return _params(body, values, config)


def chat_params(body: ChatCompletionRequest, config: ServerConfig) -> SamplingParams:
    """An answer may fill the context unless a limit is given, as in vLLM."""
    limit = body.max_completion_tokens
    values: dict[str, Any] = {"max_tokens": body.max_tokens if limit is None else limit}
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return _params(body, values, config)


def _params(body: SamplingBody, values: dict[str, Any], config: ServerConfig) -> SamplingParams:
    _check_limits(body, values, config)
    for name in SAME:
        value = getattr(body, name)
        if value is not None:
            values[name] = tuple(value) if isinstance(value, list) else value
    values["logit_bias"] = _logit_bias(body.logit_bias or {})
    values["structured_outputs"] = structured_outputs(body)
    if body.speculative is not None:
        values["num_speculative_tokens"] = body.speculative.num_speculative_tokens
    return SamplingParams(**values)


def structured_outputs(body: SamplingBody) -> StructuredOutputsParams | None:
    """From vLLM's `structured_outputs`, its older `guided_*`, or OpenAI's `response_format`."""
    asked = [*_from_guided(body), *_from_response_format(body)]
    if isinstance(body, ChatCompletionRequest):
        asked += _from_tool_choice(body)
    if body.structured_outputs is not None:
        asked.append(body.structured_outputs.model_dump(by_alias=True, exclude_none=True))
    if len(asked) > 1:
        raise RequestError(
            "the form of the answer is said more than once",
            hint="use one of response_format, structured_outputs, guided_*, tool_choice",
        )
    return StructuredOutputsParams(**asked[0]) if asked else None


def _from_guided(body: SamplingBody) -> list[dict[str, Any]]:
    names = ("json", "regex", "choice", "grammar")
    values = {name: getattr(body, f"guided_{name}") for name in names}
    return [{name: value} for name, value in values.items() if value is not None]


def _from_response_format(body: SamplingBody) -> list[dict[str, Any]]:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [{"json_object": True}]
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise ApiError(400, "response_format has no json_schema.schema", param="response_format")
    return [{"json": asked.json_schema.schema_}]


def forces_a_call(body: ChatCompletionRequest) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def _from_tool_choice(body: ChatCompletionRequest) -> list[dict[str, Any]]:
    if not forces_a_call(body):
        return []
    chosen = body.tool_choice if isinstance(body.tool_choice, NamedTool) else None
    return [{"json": call_schema(body.tools or [], chosen), "disable_any_whitespace": True}]


def _check_limits(body: SamplingBody, values: dict[str, Any], config: ServerConfig) -> None:
    """What SamplingParams leaves to whoever pays for it."""
    _at_most("n", body.n or 1, config.max_n)
    _at_most("logprobs", values.get("logprobs") or 0, config.max_logprobs)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    for name, texts in (("stop", stop), ("bad_words", body.bad_words or [])):
        _at_most(f"the number of texts in {name}", len(texts), config.max_stop_strings)
        _at_most(f"a text's length in {name}", max(map(len, texts), default=0), MAX_STOP_CHARACTERS)
    for name, given in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
        _at_most(f"the length of {name}", len(given or ()), MAX_LIST)


def _at_most(name: str, value: int, most: int) -> None:
    if value > most:
        raise ApiError(400, f"{name} is {value}; this server allows at most {most}")


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    """OpenAI's keys are token ids as text."""
    if not all(key.isascii() and key.isdecimal() and len(key) < 20 for key in given):
        raise ApiError(400, "logit_bias has a key that is not a token id", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}
