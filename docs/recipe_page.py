"""docs/recipe.md, written from the annotations of the recipe's keys.

    python docs/recipe_page.py

A test compares the page with what this script would write.
"""

from __future__ import annotations

from pathlib import Path

from peagle.train.recipe import RecipeKey, recipe_keys, sections
from peagle.train.recipe_yaml import allowed_values, key_text, section_text

PAGE = Path(__file__).with_name("recipe.md")

INTRODUCTION = """\
<!-- Written by docs/recipe_page.py. Do not edit. -->
# Keys of a recipe

A recipe is a YAML file of sections; `recipes/` holds examples. Every key has a default, so a recipe
names only what differs. On the command line `section.key=value` changes a key, and
`schedule.epochs=3` replaces whichever length the recipe has. A key that does not exist, or a value
that its key does not take, is an error before anything is loaded.

    peagle train RECIPE optimizer.learning_rate=3e-4 schedule.epochs=3
    peagle train RECIPE --print-config     # every key with its value and meaning, as a recipe

`--resume` accepts other values of the keys marked ↻ and names each; another value of any other key
stops it, and so do other rows in the data.
"""


def recipe_page() -> str:
    keys = list(recipe_keys())
    parts = [INTRODUCTION]
    for section, kind in sections().items():
        rows = [_row(key) for key in keys if key.section == section]
        heading = f"## `{section}`\n\n{section_text(kind)}\n"
        parts.append(
            "\n".join(
                [heading, "| key | values | default | meaning |", "|---|---|---|---|", *rows, ""]
            )
        )
    return "\n".join(parts)


def _row(key: RecipeKey) -> str:
    mark = " ↻" if key.changeable else ""
    cells = (f"`{key.name}`{mark}", allowed_values(key.annotation), _default(key), key_text(key))
    return f"| {' | '.join(cells)} |"


def _default(key: RecipeKey) -> str:
    if key.default is None:
        return "null"
    if isinstance(key.default, bool):
        return str(key.default).lower()
    if isinstance(key.default, tuple):
        return str(list(key.default))
    return str(key.default)


if __name__ == "__main__":
    PAGE.write_text(recipe_page(), encoding="utf-8")
