"""What the engine and its drafter are told at start. Each default stands here and nowhere else."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_type_hints

from peagle.compatibility import SPECULATIVE_ARGUMENTS, drop_unused
from peagle.errors import ConfigError, PeagleError

Method = Literal["p-eagle", "eagle3", "ngram", "none"]
Verification = Literal["coupled", "rejection"]
SpeculationMode = Literal["auto", "fixed"]
Quantization = Literal["fp8"]

MAX_SPECULATIVE_TOKENS = 64
DEFAULT_SPECULATIVE_TOKENS = 5
# Limits of speculation auto, where none are given: (K, N) by the kind of device.
AUTO_LIMITS = {"cuda": (15, 31), "cpu": (7, 15)}
MAX_DRAFT_NODES = 63  # a row's ancestors, the newest token included, are the bits of one int64

PARALLEL = "parallel_drafting"  # vLLM's word for an EAGLE-3 head that is P-EAGLE's
LARGEST_INT = 2**63  # of torch's integers

_Config = TypeVar("_Config")
# pydantic's errors about a bound: where it stands in them, and how it is written
RANGES = {
    "greater_than_equal": ("ge", ">="),
    "greater_than": ("gt", ">"),
    "less_than_equal": ("le", "<="),
    "less_than": ("lt", "<"),
}


@dataclass(frozen=True)
class Doc:
    """What a field means, in the annotation of the field: `peagle --help` prints it."""

    text: str
    if_none: str = ""  # what the engine takes where the field is None


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which drafter runs and how far ahead it drafts; vLLM's keys where vLLM has one.

    `verification` says how drafts of sampled requests are verified. "coupled": target and drafter
    share the noise of each position, so a seed gives the same tokens with any drafter or none.
    "rejection": classic rejection sampling; it accepts a few more tokens, and the output is equal
    only in distribution.
    """

    method: Method | None = None  # None: what the head says it is
    model: str | None = None
    num_speculative_tokens: int | None = None  # None: the head's own advice, else the default
    # Drafts are a tree of so many tokens, `num_speculative_tokens` of them behind each other at
    # most; None: a chain. With verification "coupled".
    num_draft_nodes: int | None = None
    # auto: each step verifies as many drafts as pay, at most these; fixed: always as many.
    # None: auto for P-EAGLE heads where neither is given and everything else allows it.
    speculation: SpeculationMode | None = None
    prompt_lookup_max: int = 4  # ngram: longest suffix that is looked up
    prompt_lookup_min: int = 2
    verification: Verification = "coupled"

    def __post_init__(self) -> None:
        _check_choice("method", self.method, (*get_args(Method), None))
        _check_choice("verification", self.verification, get_args(Verification))
        _check_choice("speculation", self.speculation, (*get_args(SpeculationMode), None))
        if self.speculation == "auto" and self.verification == "rejection":
            raise ConfigError(
                "speculation auto verifies by coupling, not by rejection",
                hint="use speculation fixed, or verification coupled",
            )
        k = self.num_speculative_tokens
        if k is not None and not 1 <= k <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens={k} is out of range",
                hint=f"use 1 to {MAX_SPECULATIVE_TOKENS}, or method none to turn speculation off",
            )
        nodes = self.num_draft_nodes
        if nodes is not None and not 1 <= nodes <= MAX_DRAFT_NODES:
            raise ConfigError(
                f"num_draft_nodes={nodes} is out of range",
                hint=f"use 1 to {MAX_DRAFT_NODES}, or leave it out for a chain",
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} and "
                f"prompt_lookup_max={self.prompt_lookup_max} allow no n-gram length",
                hint="use 1 <= prompt_lookup_min <= prompt_lookup_max",
            )
        needs_head = self.method in ("p-eagle", "eagle3")
        if needs_head and self.model is None:
            raise ConfigError(
                f"method {self.method} needs a head",
                hint="give it as model, or as --spec-model HEAD",
            )
        if self.method in ("ngram", "none") and self.model is not None:
            raise ConfigError(
                f"method {self.method} takes no head, but model={self.model!r} was given",
                hint="drop one of the two",
            )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """Reads vLLM's `--speculative-config`: its `eagle3` + `parallel_drafting` is p-eagle."""
        options = drop_unused(options, SPECULATIVE_ARGUMENTS, ConfigError)
        options = {key: value for key, value in options.items() if value is not None}
        if options.pop(PARALLEL, False) and options.get("method") in ("eagle3", None):
            options["method"] = "p-eagle"
        return from_mapping(cls, options, "speculative_config", also=(PARALLEL,))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of one engine."""

    dtype: Annotated[str, Doc("auto, float32, bfloat16 ...")] = "auto"
    device: Annotated[str, Doc("auto, cpu, cuda, cuda:1 ...")] = "auto"
    seed: Annotated[int, Doc("Seed for requests without one of their own.")] = 0
    max_model_len: Annotated[
        int | None, Doc("Maximum length of prompt and answer.", if_none="the model's")
    ] = None
    max_num_seqs: Annotated[int, Doc("Maximum number of requests at once.")] = 64
    max_num_batched_tokens: Annotated[int, Doc("Maximum number of tokens per step.")] = 2048
    block_size: Annotated[int, Doc("Tokens per block of the KV cache.")] = 16
    enable_prefix_caching: Annotated[bool, Doc("Reuse the KV cache of shared prefixes.")] = True
    quantization: Annotated[
        Quantization | None, Doc("Of the target's linear layers: fp8; vLLM has more.")
    ] = None
    # The target's rows have the same bits alone and beside any others: kernels/policy.py.
    batch_invariant: Annotated[bool, Doc("GPU: the same bits whatever else is running.")] = False
    warm_up: Annotated[bool, Doc("GPU: capture the graphs of common steps at start-up.")] = False
    gpu_memory_utilization: Annotated[float, Doc("Share of the GPU's memory that may be used.")] = (
        0.9
    )
    kv_cache_memory_bytes: Annotated[
        int | None,
        Doc("Size of the KV cache.", if_none="what the GPU has free, on a CPU at most 2 GiB"),
    ] = None

    def __post_init__(self) -> None:
        _check_choice("quantization", self.quantization, (*get_args(Quantization), None))
        if self.batch_invariant and self.quantization is not None:
            raise ConfigError(
                f"batch_invariant cannot be combined with quantization {self.quantization}",
                hint="drop one of the two",
            )
        _check_memory(self.gpu_memory_utilization, self.kv_cache_memory_bytes)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range", hint="use >= 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len={self.max_model_len} leaves no room for an answer")


def from_mapping(
    cls: type[_Config], options: Mapping[str, Any], where: str, *, also: Sequence[str] = ()
) -> _Config:
    """Builds a config dataclass, sections inside it included, with every value's type checked.

    An unknown key is an error that names the nearest one; so is a value that does not fit, with
    what its key takes. Numbers may be strings: YAML reads 1e-4, without a dot, as one. A bool is
    not a number, nor is a string a bool. `also` are keys that the caller has taken out, for the
    list of known ones.
    """
    from pydantic import ValidationError  # not needed for `peagle --help`

    _check_keys(cls, options, where, also)
    try:
        config: _Config = _adapter(cast("Any", cls)).validate_python(dict(options))
    except ValidationError as error:
        raise _misfit(error.errors(), options) from None
    _check_values(options, config)
    return config


@functools.cache  # it compiles the checks of every field
def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def changed_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """By key, `old -> new` of each value that both have and that is not the same, sections
    included."""
    found: dict[str, str] = {}
    for key in before.keys() & after.keys():
        old, new = before[key], after[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            inside = changed_values(old, new)
            found |= {f"{key}.{name}": change for name, change in inside.items()}
        elif old != new:
            found[key] = f"{json.dumps(old)} -> {json.dumps(new)}"
    return dict(sorted(found.items()))


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping from a file. Keys have - or _ between their words, as flags and as fields do."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", hint="give a YAML file") from None
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error)
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(
            f"{path} is not valid YAML: {place}{reason}", hint="correct that line"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} is not a mapping of keys to values", hint="write lines such as max-tokens: 64"
        )
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _check_keys(
    cls: type, options: Mapping[str, Any], where: str, also: Sequence[str] = ()
) -> None:
    kinds = get_type_hints(cls)
    known = [*(f.name for f in dataclasses.fields(cls)), *also]
    for key, value in options.items():
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1)
            raise ConfigError(
                f"unknown key {key!r} in {where}",
                hint=f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}",
            )
        if dataclasses.is_dataclass(kinds[key]) and isinstance(value, Mapping):
            _check_keys(cast("type", kinds[key]), value, key)


def _check_values(given: Any, made: Any, name: str = "") -> None:
    """pydantic takes true for 1 and "yes" for true; its strict mode, which does not, would also
    refuse "1e-4" for a number. Nor does torch take numbers of any size."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            inside = made.get(key, value) if isinstance(made, Mapping) else getattr(made, key)
            _check_values(value, inside, f"{name}.{key}" if name else key)
    elif isinstance(given, list | tuple) and isinstance(made, list | tuple):
        for number, (value, inside) in enumerate(zip(given, made, strict=True)):
            _check_values(value, inside, f"{name}.{number}")
    elif isinstance(given, bool) and not isinstance(made, bool):
        raise ConfigError(f"{name}={given!r} does not fit", hint="use a valid number")
    elif isinstance(given, str) and isinstance(made, bool):
        raise ConfigError(f"{name}={given!r} does not fit", hint="use true or false")
    elif isinstance(made, float) and not math.isfinite(made):
        raise ConfigError(f"{name}={given!r} is out of range", hint="use a finite number")
    elif isinstance(made, int) and abs(made) >= LARGEST_INT:
        raise ConfigError(f"{name}={given!r} is out of range", hint="use fewer digits")


def _misfit(errors: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> PeagleError:
    """The first value that does not fit; a union has an error for each of its members."""
    own = errors[0].get("ctx", {}).get("error")
    if isinstance(own, PeagleError):  # from a __post_init__
        return own
    path, value = _place(errors[0]["loc"], options)
    name = ".".join(str(part) for part in path)
    if errors[0]["type"] == "missing" and path == errors[0]["loc"]:
        return ConfigError(f"{name!r} is not set")
    same = [error for error in errors if error["loc"][: len(path)] == path]
    wanted = " or ".join(dict.fromkeys(expected_value(error) for error in same))
    wrong = "is out of range" if errors[0]["type"] in RANGES else "does not fit"
    return ConfigError(f"{name}={value!r} {wrong}", hint=f"use {wanted}")


def expected_value(error: Mapping[str, Any]) -> str:
    """What would have fitted, of one of pydantic's errors."""
    if error["type"] == "dataclass_type":
        return "a mapping of keys to values"
    if str(error["type"]).startswith("bool"):
        return "true or false"
    if error["type"] == "missing":  # the tuple is too short
        return "more values"
    if error["type"] == "too_long":
        return f"at most {error['ctx']['max_length']} values"
    if error["type"] == "string_too_short":
        return "a text that is not empty"
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    if error["type"] in RANGES:
        key, sign = RANGES[error["type"]]
        bound = error["ctx"][key]
        return f"a number {sign} {int(bound) if bound == int(bound) else bound}"
    return str(error["msg"]).removeprefix("Input should be ").partition(", ")[0]


def _place(loc: tuple[int | str, ...], value: Any) -> tuple[tuple[int | str, ...], Any]:
    """The part of `loc` that leads into the options (a union's branch does not), and its value."""
    for depth, part in enumerate(loc):
        if isinstance(value, list | tuple):
            inside = isinstance(part, int) and part < len(value)
        else:
            inside = isinstance(value, Mapping) and part in value
        if not inside:
            return (loc[: depth + 1], None) if isinstance(value, Mapping) else (loc[:depth], value)
        value = value[part]
    return loc, value


def _check_memory(share: float, cache_bytes: int | None) -> None:
    if not 0 < share <= 1:
        raise ConfigError(
            f"gpu_memory_utilization={share} is out of range", hint="use a share in (0, 1]"
        )
    if cache_bytes is not None and cache_bytes < 1:
        raise ConfigError(f"kv_cache_memory_bytes={cache_bytes} is out of range", hint="use >= 1")


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        names = ", ".join(str(a) for a in allowed if a is not None)
        raise ConfigError(f"{name}={value!r} is unknown", hint=f"use one of: {names}")
