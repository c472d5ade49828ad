"""Flags that several verbs share, in groups: a verb takes a group as one parameter.

A flag that sets a field of a config has the field's name, type and help, and leaves its default
to the config, so that each is declared in one place.

sampling  how answers are sampled
answers   the same for verbs that let a target answer prompts for its own training
drafter   which drafter runs
engine    sizes and limits of the engine
vllm      which engine answers, and what only vLLM is told
deploy    where and how a model is deployed
server    what the embedded HTTP server is told
bench     the keys of BenchPlan
simulate  where step times come from
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from peagle.config import LARGEST_INT, Doc
from peagle.errors import ConfigError

OTHER_NAMES = {"num_speculative_tokens": "--spec-tokens", "num_draft_nodes": "--spec-nodes"}

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a Hugging Face id, or the built-in smollm2-135m."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="The last line of stdout is one JSON document.")]
System = Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")]


class ConfigFlags:
    """A group whose flags are fields of a config; `given` holds those that the user gave."""

    def __init__(self, **values: Any) -> None:
        self.given = {name: value for name, value in values.items() if value is not None}

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """One for each flag; see `field_flag`."""
        raise NotImplementedError


def expand_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command` the flags of each parameter that is a group: ConfigFlags or a dataclass.

    typer reads a function's signature; this hands it the wide one and calls the narrow one.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, type] = {p.name: p.annotation for p in parameters if _is_group(p.annotation)}
    flags = {name: _parameters(group) for name, group in groups.items()}

    def expanded(**values: Any) -> None:
        check_numbers(values)
        for name, group in groups.items():
            values[name] = group(**{flag.name: values.pop(flag.name) for flag in flags[name]})
        command(**values)

    wide = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name not in groups]
    wide += [flag for group in flags.values() for flag in group]
    expanded.__signature__ = inspect.Signature(wide)  # type: ignore[attr-defined]
    expanded.__name__ = command.__name__
    expanded.__doc__ = command.__doc__
    return expanded


def field_flag(
    config: type,
    name: str,
    panel: str,
    *,
    kind: Any = None,
    default: Any = None,
    metavar: str | None = None,
    note: str = "",
    described_in: type | None = None,
) -> inspect.Parameter:
    """The flag of a field. `kind` stands for a type that a command line cannot express;
    `described_in` is the config whose field of that name has the help, where `config` has none."""
    doc = doc_of(config, name) or doc_of(described_in or config, name)
    assert doc is not None, f"{config.__name__}.{name} has no Doc"
    own = kind or _hint(config, name)[0]
    option = typer.Option(
        *_names(name, own, _default(config, name)),
        help=f"{doc.text} {note}".strip(),
        metavar=metavar,
        rich_help_panel=panel,
    )
    accepted = _as_typed(own) | None if default is None else _as_typed(own)
    return _parameter(name, default, Annotated[accepted, option])


def doc_of(config: type, name: str) -> Doc | None:
    """What the annotation of a config's field says about it."""
    return next((one for one in _hint(config, name)[1] if isinstance(one, Doc)), None)


def check_numbers(values: Mapping[str, Any]) -> None:
    """Ranges stand at the flags; what no flag can mean is refused here."""
    for name, value in values.items():
        too_large = isinstance(value, int) and abs(value) >= LARGEST_INT
        if too_large or (isinstance(value, float) and not math.isfinite(value)):
            hint = "use fewer digits" if too_large else "use a finite number"
            raise ConfigError(f"{_flag_name(name)} {value} is out of range", hint=hint)


def _flag_name(key: str) -> str:
    return OTHER_NAMES.get(key, f"--{key.replace('_', '-')}")


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


def _is_group(kind: Any) -> bool:
    return is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, ConfigFlags))


def _parameters(group: type) -> list[inspect.Parameter]:
    if issubclass(group, ConfigFlags):
        return group.parameters()
    assert is_dataclass(group)
    hints = _hints(group)
    return [_parameter(f.name, f.default, hints[f.name]) for f in fields(group)]


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def _hint(config: type, name: str) -> tuple[Any, tuple[Any, ...]]:
    """A field's type, and what its annotation holds besides."""
    hint = _hints(config)[name]
    return (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())


@functools.cache  # evaluates every annotation of the class
def _hints(config: type) -> dict[str, Any]:
    return get_type_hints(config, include_extras=True)


def _default(config: type, name: str) -> Any:
    return next(f.default for f in fields(config) if f.name == name)


def _names(name: str, kind: Any, default: Any) -> tuple[str, ...]:
    """A switch that is off by default has no `--no-` form; one that may be unset has both."""
    return (f"--{name.replace('_', '-')}",) if kind is bool and not default else ()


def _as_typed(kind: Any) -> Any:
    """The type without None. Literals become text: the config checks them, and vLLM knows more."""
    members = [member for member in get_args(kind) if member is not NoneType]
    if len(members) == 1 and NoneType in get_args(kind):
        return _as_typed(members[0])
    return str if get_origin(kind) is Literal else kind
