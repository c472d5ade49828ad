"""What every verb understands beside its own flags: -q, -v, --config, and vLLM's ways of writing.

vLLM takes `--max_model_len` for `--max-model-len`, and `--speculative-config.model HEAD` for one
key of an option whose value is JSON.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.cli.flags import OTHER_NAMES, parse_json_object
from peagle.cli.help import Command
from peagle.cli.progress import shown_progress
from peagle.cli.render import naming_flags
from peagle.config import read_yaml
from peagle.errors import ConfigError
from peagle.log import setup_logging

JSON = "JSON"  # metavar of the options whose value is a JSON object

Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, help="Log more; -vv: everything.", show_default=False
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only results and errors.")]


def with_dashes(name: str) -> str:
    return name.replace("_", "-")


class Verb(Command):
    """A command that reads dotted flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        objects = [flag for option in self.params if option.metavar == JSON for flag in option.opts]
        return super().parse_args(ctx, join_dotted_flags(args, objects))


def join_dotted_flags(args: list[str], objects: list[str]) -> list[str]:
    """`--a.b 1 --a.c.d x` -> `--a '{"b": 1, "c": {"d": "x"}}'`, for the flags in `objects`.

    A value is JSON where it reads as JSON, and text otherwise. Keys are set in the order in which
    they stand, in what `--a` itself says.
    """
    own, behind = _split(args)
    left: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    words = iter(own)
    for word in words:
        name, assigned, value = word.partition("=")
        flag, dot, path = name.partition(".")
        flag = with_dashes(flag)
        is_dotted = bool(dot) and flag in objects
        if not is_dotted:
            left.append(word)
            continue
        value = value if assigned else next(words, "")
        _set(found.setdefault(flag, {}), path.split("."), _json_or_text(value), name)
    for flag, keys in found.items():
        left = _merged(left, flag, keys)
    return left + behind


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """Ours, and from `--` on somebody else's."""
    end = args.index("--") if "--" in args else len(args)
    return args[:end], args[end:]


def _set(target: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    if not all(path):
        raise ConfigError(f"{name} names no key", hint="write --speculative-config.model HEAD")
    for key in path[:-1]:
        inside = target.setdefault(key, {})
        if not isinstance(inside, dict):
            raise ConfigError(f"{name} is inside of {key!r}, which has a value already")
        target = inside
    target[path[-1]] = value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _merged(args: list[str], flag: str, keys: dict[str, Any]) -> list[str]:
    """Keys that stand alone are added to the JSON of their flag, if that is there."""
    for place, word in enumerate(args):
        name, assigned, value = word.partition("=")
        if with_dashes(name) != flag:
            continue
        end = place + 1 if assigned else place + 2
        whole = parse_json_object(flag, value if assigned else "".join(args[place + 1 : end]))
        args, keys = args[:place] + args[end:], whole | keys
        break
    return [*args, f"{flag}={json.dumps(keys)}"]


def as_verb(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the flags that every verb has; `--config` only where it has none of its own.

    typer reads a function's signature; this hands it the wide one and calls the narrow one.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    common = [p for p in _common_flags() if p.name not in {q.name for q in own}]

    def wide(**values: Any) -> None:
        invocation: typer.Context = values.pop("invocation")
        before = invocation.find_root().params
        quiet = before["quiet"] or values.pop("quiet")
        setup_logging(-1 if quiet else before["verbose"] + values.pop("verbose"))
        with shown_progress(), naming_flags(_flags_by_option(invocation.command.params)):
            command(**{p.name: values[p.name] for p in own})

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword) for p in own] + common
    wide.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wide.__name__, wide.__doc__ = command.__name__, command.__doc__
    return wide


def _flags_by_option(parameters: list[Any]) -> dict[str, str]:
    """By what Python calls them. Drafters have keys of their own: see DrafterFlags."""
    flags = {p.name: f"--{_key(p)}" for p in parameters if p.opts[0].startswith("--")}
    return flags | {key: flag for key, flag in OTHER_NAMES.items() if flag in flags.values()}


def _common_flags() -> list[inspect.Parameter]:
    return [
        _keyword("invocation", typer.Context),
        _keyword("config", _Config, None),
        _keyword("quiet", Quiet, False),
        _keyword("verbose", Verbose, 0),
    ]


def _keyword(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _take_defaults(context: typer.Context, file: Path | None) -> Path | None:
    """Values of the file stand in for flags that are not given."""
    if file is not None and not context.resilient_parsing:
        parameters = {_key(p): p for p in context.command.params if p.name not in NOT_IN_A_FILE}
        context.default_map = {
            parameters[key].name: _as_given(key, value, parameters[key])
            for key, value in _known(read_yaml(file), list(parameters), file).items()
        }
    return file


NOT_IN_A_FILE = ("config", "quiet", "verbose")
_Config = Annotated[
    Path | None,
    typer.Option(
        help="Read options from a YAML file; flags override it.",
        metavar="FILE",
        callback=_take_defaults,
        is_eager=True,
    ),
]


def _key(parameter: Any) -> str:
    """What a file calls it: its long flag, or the name of a positional argument."""
    long = [flag for flag in parameter.opts if flag.startswith("--")]
    return long[0].removeprefix("--") if long else with_dashes(parameter.name)


def _known(given: Mapping[str, Any], keys: list[str], file: Path) -> dict[str, Any]:
    """The file's values by key. One that is null is not given."""
    found = {}
    for key, value in given.items():
        name = with_dashes(key)
        if name not in keys:
            nearest = difflib.get_close_matches(name, keys, n=1)
            raise ConfigError(
                f"unknown key {key!r} in {file}",
                hint=f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(keys)}",
            )
        if value is not None:
            found[name] = value
    return found


def _as_given(key: str, value: Any, parameter: Any) -> Any:
    """A value of the file in the form in which a command line has it."""
    is_switch = getattr(parameter, "is_bool_flag", False)
    if isinstance(value, bool) != is_switch:
        wanted = "true or false" if is_switch else "a value rather than true or false"
        raise ConfigError(f"{key}={value!r} does not fit", hint=f"use {wanted}")
    several = parameter.multiple or parameter.nargs == -1
    if isinstance(value, dict) and parameter.metavar == JSON:
        return json.dumps(value)
    if isinstance(value, dict) or isinstance(value, list) != several:
        wanted = "a list" if several else "one value"
        raise ConfigError(f"{key}={value!r} does not fit", hint=f"use {wanted}")
    if several:
        return [str(one) for one in value]
    return value if is_switch else str(value)
