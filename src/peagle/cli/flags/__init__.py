"""Groups of flags as dataclasses, so that verbs share them without repeating them.

bench      the keys of BenchPlan
simulate   where step times come from
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def expand_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command` one option per field of each parameter whose type is a dataclass.

    typer reads a function's signature; this hands it the wide one and calls the narrow one.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        p.name: p.annotation for p in parameters if is_dataclass(p.annotation)
    }

    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        command(**values)

    wide = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name not in groups]
    wide += [option for group in groups.values() for option in _options(group)]
    expanded.__signature__ = inspect.Signature(wide)  # type: ignore[attr-defined]
    expanded.__name__ = command.__name__
    expanded.__doc__ = command.__doc__
    return expanded


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name])
        for f in fields(group)
    ]
