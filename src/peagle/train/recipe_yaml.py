"""A recipe as YAML with what is known of each key above it, and the same in words for the docs."""

from __future__ import annotations

import inspect
import json
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from peagle.train.recipe import Recipe, RecipeKey, recipe_keys, sections

NAMES = {int: "int", float: "float", str: "text", bool: "true or false"}
BOUNDS = ("ge", "gt", "le", "lt")


def commented_yaml(recipe: Recipe) -> str:
    """Reads back as the same recipe."""
    values, keys = recipe.as_dict(), list(recipe_keys())
    parts = []
    for section, kind in sections().items():
        lines = [f"# {section_text(kind)}", f"{section}:"]
        for key in keys:
            if key.section == section:
                lines.append(f"  # {key_text(key)} [{allowed_values(key.annotation)}]")
                lines.append(f"  {key.name}: {_yaml(values[section][key.name])}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def section_text(kind: type) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


def key_text(key: RecipeKey) -> str:
    return f"{key.doc.text} null: {key.doc.if_none}." if key.doc.if_none else key.doc.text


def allowed_values(annotation: Any) -> str:
    """What a key takes: `int >= 1, or null`, `linear, cosine or constant`."""
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        first, *others = [NAMES.get(part) or allowed_values(part) for part in _members(kind)]
        return ", or ".join([f"{first}{_range(metadata)}", *others])
    if annotation is NoneType:
        return "null"
    if get_origin(annotation) is Literal:
        *words, last = map(str, get_args(annotation))
        return f"{', '.join(words)} or {last}" if words else last
    if get_origin(annotation) is tuple:
        first, *rest = get_args(annotation)
        each = NAMES.get(first) or allowed_values(first)
        return f"list of {each}" if Ellipsis in rest else f"list of {len(rest) + 1}: {each}"
    return NAMES[annotation]


def _members(kind: Any) -> tuple[Any, ...]:
    """Of a union; any other type alone."""
    is_union = get_origin(kind) not in (None, Literal, tuple, Annotated)
    return get_args(kind) if is_union else (kind,)


def _range(metadata: list[Any]) -> str:
    """` >= 1`, ` in (0, 1]`; nothing where every value is allowed."""
    bound = {b: getattr(m, b) for m in metadata for b in BOUNDS if getattr(m, b, None) is not None}
    low, high = bound.get("ge", bound.get("gt")), bound.get("le", bound.get("lt"))
    if low is not None and high is not None:
        return f" in {'[' if 'ge' in bound else '('}{low}, {high}{']' if 'le' in bound else ')'}"
    return f" >= {low}" if "ge" in bound else f" > {low}" if "gt" in bound else ""


def _yaml(value: Any) -> str:
    import yaml  # type: ignore[import-untyped]

    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return str(text).removesuffix("...\n").strip()
