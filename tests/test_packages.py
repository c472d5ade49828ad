"""Claim: the docstring of every package is its table of contents."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import peagle

SRC = Path(peagle.__file__).parent
PACKAGES = {
    str(file.parent.relative_to(SRC.parent)): file.parent for file in SRC.rglob("__init__.py")
}
ROOM = re.compile(r"^(\w+)  +\S", re.MULTILINE)  # a name, a gap, what is to be found there


def rooms(package: Path) -> list[str]:
    """Modules and folders of a package."""
    modules = [file.stem for file in package.glob("*.py") if file.stem != "__init__"]
    folders = [entry.name for entry in package.iterdir() if entry.is_dir()]
    return sorted(modules + [name for name in folders if name != "__pycache__"])


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_package_names_its_modules_and_no_others(name: str) -> None:
    package = PACKAGES[name]
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    assert docstring is not None
    assert sorted(ROOM.findall(docstring)) == rooms(package)
