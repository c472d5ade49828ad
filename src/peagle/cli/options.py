"""Flags that several verbs share, and what they become: vLLM's names where vLLM has one.

A flag's default is the default of the field it sets, so each stands in one place.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.backends import BackendName
from peagle.config import EngineConfig, Method, SpeculativeConfig
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.backends.contract import Backend
    from peagle.backends.vllm.options import VllmOptions
    from peagle.checkpoints.heads.references import HeadInfo
    from peagle.engine.llm import LLM

# The command line differs from SamplingParams in two defaults: an answer is whole rather than
# 16 tokens long, and greedy, so that the same command prints the same text.
MAX_TOKENS = 256
TEMPERATURE = 0.0

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a Hugging Face id, or the built-in smollm2-135m."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="The last line of stdout is one JSON document.")]
System = Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")]


def _sampling(help_text: str, *, flag: str | None = None, metavar: str | None = None) -> Any:
    names = (flag,) if flag else ()  # a bool without a name would get a --no- twin
    return typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel="Sampling")


def _engine(help_text: str, *, flag: str | None = None) -> Any:
    names = (flag,) if flag else ()
    return typer.Option(*names, help=help_text, rich_help_panel="Engine")


def _drafter(help_text: str, *, metavar: str | None = None) -> Any:
    return typer.Option(help=help_text, metavar=metavar, rich_help_panel="Speculation")


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How answers are sampled; field names are those of SamplingParams."""

    max_tokens: Annotated[int, _sampling("Most tokens in an answer.")] = MAX_TOKENS
    min_tokens: Annotated[int, _sampling("No end before that many.")] = SamplingParams.min_tokens
    temperature: Annotated[float, _sampling("0 is greedy, 1 the model as it is.")] = TEMPERATURE
    top_p: Annotated[float, _sampling("Keep the best tokens that sum to it.")] = (
        SamplingParams.top_p
    )
    top_k: Annotated[int, _sampling("Keep that many of the best; 0: all.")] = SamplingParams.top_k
    min_p: Annotated[float, _sampling("Least share of the best token's probability.")] = (
        SamplingParams.min_p
    )
    repetition_penalty: Annotated[float, _sampling("Above 1: less repetition.")] = (
        SamplingParams.repetition_penalty
    )
    presence_penalty: Annotated[float, _sampling("Once for a token already used.")] = (
        SamplingParams.presence_penalty
    )
    frequency_penalty: Annotated[float, _sampling("For each use of a token.")] = (
        SamplingParams.frequency_penalty
    )
    seed: Annotated[int | None, _sampling("Same seed, same answer.")] = SamplingParams.seed
    stop: Annotated[list[str] | None, _sampling("Stop string; may be repeated.")] = None
    stop_token_ids: Annotated[list[int] | None, _sampling("Stop id; may be repeated.")] = None
    ignore_eos: Annotated[
        bool, _sampling("Go on past the end-of-sequence token.", flag="--ignore-eos")
    ] = SamplingParams.ignore_eos
    logit_bias: Annotated[
        str | None, _sampling('Added to logits: {"42": -100}', metavar="JSON")
    ] = None
    bad_words: Annotated[list[str] | None, _sampling("Never said; may be repeated.")] = None

    def params(self, *, n: int = 1, logprobs: int | None = None) -> SamplingParams:
        self._refuse_filters_without_temperature()
        values = asdict(self)
        for name in ("stop", "stop_token_ids", "bad_words"):
            values[name] = tuple(values[name] or ())
        values["logit_bias"] = _logit_bias(self.logit_bias)
        return SamplingParams(n=n, logprobs=logprobs, **values)

    def _refuse_filters_without_temperature(self) -> None:
        if self.temperature > 0:
            return
        for name in ("top_p", "top_k", "min_p"):
            if getattr(self, name) != getattr(SamplingParams, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} has no effect at temperature 0",
                    hint="add --temperature 1, or drop it",
                )


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Sizes and limits; field names are those of EngineConfig."""

    dtype: Annotated[str, _engine("auto, float32, bfloat16 ...")] = EngineConfig.dtype
    device: Annotated[str, _engine("auto, cpu, cuda, cuda:1 ...")] = EngineConfig.device
    max_model_len: Annotated[
        int | None, _engine("Longest prompt and answer together; default: the model's.")
    ] = EngineConfig.max_model_len
    max_num_seqs: Annotated[
        int | None, _engine(f"Requests at once; embedded: {EngineConfig.max_num_seqs}.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, _engine(f"Tokens per step; embedded: {EngineConfig.max_num_batched_tokens}.")
    ] = None
    block_size: Annotated[
        int | None, _engine(f"Tokens per KV block; embedded: {EngineConfig.block_size}.")
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        _engine("KV cache; embedded: what the GPU has free, on a CPU at most 2 GiB."),
    ] = None
    quantization: Annotated[
        str | None, _engine("Of the target's weights: fp8; vLLM knows more.")
    ] = None
    batch_invariant: Annotated[
        bool,
        _engine("GPU: the same bits alone and beside other requests.", flag="--batch-invariant"),
    ] = EngineConfig.batch_invariant
    gpu_memory_utilization: Annotated[
        float | None,
        _engine(f"Share of the GPU's memory; embedded: {EngineConfig.gpu_memory_utilization}."),
    ] = None

    def config(self, backend: BackendName = "embedded") -> EngineConfig:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if backend == "vllm":  # VllmOptions carries it: vLLM knows more kinds than we do
            given.pop("quantization", None)
        return EngineConfig(**given)


@dataclass(frozen=True, kw_only=True)
class DrafterFlags:
    """Which drafter runs: three flags, or vLLM's JSON instead."""

    spec_model: Annotated[
        str | None, _drafter("The head: a folder, an id or a name.", metavar="HEAD")
    ] = None
    spec_tokens: Annotated[int | None, _drafter("Draft tokens per step.", metavar="K")] = None
    spec_method: Annotated[Method | None, _drafter("Default: what the head says.")] = None
    speculative_config: Annotated[
        str | None, _drafter("The same and more as JSON, as for vLLM.", metavar="JSON")
    ] = None

    def config(self) -> SpeculativeConfig | None:
        """None where no drafter was asked for."""
        given = {
            "model": self.spec_model,
            "num_speculative_tokens": self.spec_tokens,
            "method": self.spec_method,
        }
        if self.speculative_config is not None:
            return self._from_json(any(value is not None for value in given.values()))
        if self.spec_tokens is not None:
            self._refuse_tokens_without_drafter()
        if self.spec_model is None and self.spec_method in (None, "none"):
            return None
        return SpeculativeConfig.from_mapping(given)

    def _from_json(self, others_given: bool) -> SpeculativeConfig:
        if others_given:
            raise ConfigError(
                "--speculative-config and --spec-* were both given", hint="use one of the two"
            )
        options = parse_json_object("--speculative-config", self.speculative_config or "")
        return SpeculativeConfig.from_mapping(options)

    def _refuse_tokens_without_drafter(self) -> None:
        if self.spec_model is None and self.spec_method in (None, "none"):
            raise ConfigError(
                f"--spec-tokens {self.spec_tokens} was given, but no drafter",
                hint="add --spec-model HEAD or --spec-method ngram, or drop --spec-tokens",
            )


def build_llm(model: str, engine: EngineConfig, drafter: SpeculativeConfig | None) -> LLM:
    """The one place where a verb gets the embedded engine; tests put a fake one here."""
    from peagle.engine.llm import LLM

    return LLM(model, speculative_config=drafter, **asdict(engine))


def build_backend(
    model: str,
    engine: EngineConfig,
    drafter: SpeculativeConfig | None,
    vllm: VllmOptions | None,
) -> Backend:
    """The embedded engine, or vLLM where its options are given."""
    if vllm is None:
        return build_llm(model, engine, drafter)
    from peagle.backends.vllm.backend import VllmBackend

    return VllmBackend(model, engine, drafter, vllm)


def shipped_heads() -> list[HeadInfo]:
    """The heads that come with the package; the other seam for tests."""
    from peagle.checkpoints.heads.references import list_heads

    return list_heads()


def parse_json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} is not valid JSON: {error}", hint="quote it for the shell: '{\"key\": 1}'"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is not a JSON object", hint="use '{\"key\": value}'")
    return value


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
