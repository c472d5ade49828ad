"""Flags and YAML files -> a BenchPlan, with every value's type checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from peagle.bench.plan import BenchPlan
from peagle.bench.workloads import split_references
from peagle.config import from_mapping
from peagle.errors import ConfigError

NEEDED = {"model": "MODEL", "out": "--out DIR"}  # key -> how to give it


def make_plan(given: Mapping[str, Any], where: str) -> BenchPlan:
    """From the keys of a file or of flags; unknown keys are errors that name the nearest."""
    options = {key: value for key, value in given.items() if value is not None}
    for needed in NEEDED:
        if needed not in options:
            raise ConfigError(f"{where} names no {needed}", hint=f"give {NEEDED[needed]}")
    kinds = get_type_hints(BenchPlan)
    typed = {key: _typed(key, value, kinds.get(key)) for key, value in options.items()}
    return from_mapping(BenchPlan, typed, where)


def read_yaml(path: Path) -> dict[str, Any]:
    """Keys with - or _ between their words, as flags and as fields have them."""
    import yaml  # type: ignore[import-untyped,unused-ignore]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} is not a mapping of keys to values", hint="write lines such as concurrency: 4"
        )
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _typed(key: str, value: Any, kind: Any) -> Any:
    if kind == list[str]:
        return split_references(value) if isinstance(value, str) else [str(v) for v in _list(value)]
    if kind in (list[int], list[float]):
        parts = value.split(",") if isinstance(value, str) else _list(value)
        return [_number(key, part, int if kind == list[int] else float) for part in parts]
    if kind is float:
        return _number(key, value, float)
    if kind is not None and not _fits(value, kind):
        raise ConfigError(f"{key}={value!r} is not understood", hint=f"it takes {_named(kind)}")
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _number(key: str, value: Any, kind: type[int] | type[float]) -> float:
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    known = number is not None and math.isfinite(number)
    if not known or isinstance(value, bool) or (isinstance(value, float) and number != value):
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{key}={value!r} is not understood", hint=f"it takes {what}")
    assert number is not None
    return number


def _fits(value: Any, kind: Any) -> bool:
    kinds = get_args(kind) or (kind,)
    return type(value) in kinds or (float in kinds and type(value) is int)


def _named(kind: Any) -> str:
    names = [k.__name__ for k in get_args(kind) or (kind,) if k is not type(None)]
    return " or ".join(names)
