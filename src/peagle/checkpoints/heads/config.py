"""A head's config.json, in any layout -> HeadConfig, or one line that says what is wrong."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from peagle.checkpoints.files import read_json, tensor_names
from peagle.checkpoints.heads.layouts import CONFIG, FORMAT, FORMAT_VERSION, layout_of
from peagle.checkpoints.heads.speculators_layout import unwrap
from peagle.checkpoints.heads.vllm_layout import MASK_KEYS, read_options
from peagle.errors import HeadError, ModelError, PeagleError

TABLES = ["embed_tokens.weight", "lm_head.weight"]

if TYPE_CHECKING:
    from peagle.models.head_config import HeadConfig


def read_head_config(folder: Path, *, with_weights: bool = True) -> HeadConfig:
    """The config of a head's folder, whichever layout it has.

    A foreign layout shows in its tensors which tables a head has: without weights it is taken to
    have both, as those that others released.
    """
    where = str(folder / CONFIG)
    with as_head_errors():
        options = read_json(folder / CONFIG)
        layout = layout_of(options, where)
        names = tensor_names(folder) if with_weights and layout != "native" else TABLES
    if layout == "native":
        version = options.pop(FORMAT)
        if version != FORMAT_VERSION:
            raise HeadError(
                f"{where} is not a native head of format {FORMAT_VERSION}",
                hint=f"it says {FORMAT}={version!r}",
            )
        return _checked(options, where)
    if layout == "speculators":
        options = unwrap(options, where)
    fields = read_options(options, names, where)
    if with_weights:
        _check_method(fields["method"], names, where)
    return _checked(fields, where)


def _check_method(method: str, names: list[str], where: str) -> None:
    """The mask id makes a head P-EAGLE; the tensors must agree."""
    if (method == "p-eagle") == ("mask_hidden" in names):
        return
    if method == "p-eagle":
        raise HeadError(f"{where} names a mask id, but mask_hidden is not among the tensors")
    raise HeadError(f"{where} has mask_hidden, but lacks its mask id ({' or '.join(MASK_KEYS)})")


def _checked(options: dict[str, Any], where: str) -> HeadConfig:
    from peagle.config import from_mapping
    from peagle.models.head_config import HeadConfig

    kinds = get_type_hints(HeadConfig)
    for name, value in options.items():
        if name in kinds and not _fits(value, kinds[name]):
            raise HeadError(f"{where}: {name} cannot be {json.dumps(value)}")
        options[name] = tuple(value) if isinstance(value, list) else value
    try:
        return from_mapping(HeadConfig, options, where)
    except TypeError as error:  # a key is missing: dataclasses name it
        raise HeadError(f"{where}: {str(error).split('__init__() ')[-1]}") from error
    except PeagleError as error:
        prefix = "" if CONFIG in error.message else f"{where}: "
        raise HeadError(prefix + error.message, hint=error.hint) from error


@contextlib.contextmanager
def as_head_errors() -> Iterator[None]:
    """What reads files speaks of models; in a head's folder the same fault is the head's."""
    try:
        yield
    except ModelError as error:
        raise HeadError(error.message, hint=error.hint) from error


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value has a field's type: arithmetic on a wrong one fails far from here."""
    if kind is float:
        return type(value) in (int, float)
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(type(item) is int for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict)
    if get_origin(kind) is UnionType:
        return any(_fits(value, one) for one in get_args(kind))
    return get_origin(kind) is Literal or type(value) is kind
