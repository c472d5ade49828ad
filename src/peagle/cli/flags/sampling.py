"""How answers are sampled: the fields of SamplingParams, as flags."""

from __future__ import annotations

import inspect
from typing import Any

from peagle.cli.flags import ConfigFlags, field_flag, parse_json_object
from peagle.config import from_mapping
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams, StructuredOutputsParams

# The command line differs from SamplingParams in two defaults: an answer is whole rather than
# 16 tokens long, and greedy, so that the same command prints the same text.
MAX_TOKENS = 256
TEMPERATURE = 0.0

NUMBERS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "ignore_eos"),
)
DEFAULTS = {"max_tokens": MAX_TOKENS, "temperature": TEMPERATURE}
REPEATED = {"stop": list[str], "stop_token_ids": list[int], "bad_words": list[str]}


class SamplingFlags(ConfigFlags):
    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        return [
            *(_flag(name, default=_default(name)) for name in NUMBERS),
            *(_flag(name, kind=kind, note="May be repeated.") for name, kind in REPEATED.items()),
            _flag("logit_bias", kind=str, metavar="JSON"),
            _flag("structured_outputs", kind=str, metavar="JSON"),
        ]

    def params(self, *, n: int = 1, logprobs: int | None = None) -> SamplingParams:
        self._refuse_filters_without_temperature()
        values = self.given | {"logit_bias": _logit_bias(self.given.get("logit_bias"))}
        values |= {name: tuple(values[name]) for name in REPEATED if name in values}
        if "structured_outputs" in values:
            values["structured_outputs"] = _structured_outputs(values["structured_outputs"])
        return SamplingParams(n=n, logprobs=logprobs, **values)

    def _refuse_filters_without_temperature(self) -> None:
        if self.given["temperature"] > 0:
            return
        for name in ("top_p", "top_k", "min_p"):
            if self.given[name] != getattr(SamplingParams, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} has no effect at temperature 0",
                    hint="add --temperature 1, or drop it",
                )


def _flag(name: str, **options: Any) -> inspect.Parameter:
    return field_flag(SamplingParams, name, "Sampling", **options)


def _default(name: str) -> Any:
    return DEFAULTS.get(name, getattr(SamplingParams, name))


def _structured_outputs(text: str) -> StructuredOutputsParams:
    flag = "--structured-outputs"
    return from_mapping(StructuredOutputsParams, parse_json_object(flag, text), flag)


def _logit_bias(text: str | None) -> dict[int, float]:
    if text is None:
        return {}
    try:
        return {
            int(token_id): float(bias)
            for token_id, bias in parse_json_object("--logit-bias", text).items()
        }
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--logit-bias maps token ids to numbers: {error}", hint="use '{\"42\": -100}'"
        ) from None
