"""JSON -> dataclasses, checked: a wrong type or an unknown key is an error that says where."""

from __future__ import annotations

import dataclasses
import difflib
import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from peagle.errors import DataError

_T = TypeVar("_T")


def decode(cls: type[_T], value: Any, where: str) -> _T:
    """Reads a dataclass, and the dataclasses, lists and dicts of texts in its fields."""
    result = _read(cls, value, where)
    assert isinstance(result, cls)
    return result


def _read(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _read_dataclass(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (a for a in arguments if a is not type(None))
        return _read(kind, value, where)
    if origin is list and isinstance(value, list):
        return [_read(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not (origin or kind):  # `type`: True is no number here
        raise DataError(f"{where} is {value!r}, not {_name(kind)}")
    return value


def _read_dataclass(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise DataError(f"{where} is {value!r}, not an object")
    hints = get_type_hints(cls)
    for key in value:
        if key not in hints:
            nearest = difflib.get_close_matches(key, hints, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else None
            raise DataError(f"{where} has an unknown key {key!r}", hint=hint)
    given = {key: _read(hints[key], item, f"{where}.{key}") for key, item in value.items()}
    try:
        return cls(**given)
    except TypeError as error:
        missing = str(error).partition("missing ")[2]
        raise DataError(f"{where}: missing {missing or error}") from None


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))
