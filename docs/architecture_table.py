"""The tables of packages and modules in docs/architecture.md, made from the sources themselves.

    python docs/architecture_table.py

A test compares names and imports with what this script would write; lines may drift by a fifth.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

PAGE = Path(__file__).with_name("architecture.md")
SOURCES = Path(__file__).parents[1] / "src/peagle"
BEGIN, END = "<!-- packages: written by docs/architecture_table.py -->", "<!-- end of packages -->"
CODE = (".py", ".c")


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(page: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} lacks {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def tables() -> str:
    header = ["package", "what it is", "files", "lines", "imports"]
    ranked = sorted(packages(), key=lambda name: (-rank(name), name))
    return "\n".join(
        [
            *table(header, (package_row(name) for name in ranked)),
            "",
            "Beside the packages:",
            "",
            *table(["module", "what it is"], ([f"`{m}.py`", purpose(m)] for m in modules())),
        ]
    )


def package_row(name: str) -> list[str]:
    files = [f for f in (SOURCES / name).rglob("*") if f.suffix in CODE]
    lines = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files)
    needed = sorted(imports(name) & set(packages()), key=lambda other: (-rank(other), other))
    return [f"`{name}/`", purpose(name), str(len(files)), f"{lines:,}", ", ".join(needed)]


def packages() -> list[str]:
    return sorted(file.parent.name for file in SOURCES.glob("*/__init__.py"))


def modules() -> list[str]:
    return sorted(file.stem for file in SOURCES.glob("*.py") if not file.stem.startswith("_"))


def purpose(name: str) -> str:
    """The first sentence of a docstring."""
    file = SOURCES / name / "__init__.py" if name in packages() else SOURCES / f"{name}.py"
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


@cache
def imports(name: str) -> frozenset[str]:
    """Packages and modules of ours that one imports, types and lazy imports included."""
    folder = SOURCES / name
    found: set[str] = set()
    for file in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found |= {n.split(".")[1] for n in imported(node) if n.startswith("peagle.")}
    return frozenset(found - {name})


def imported(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def rank(name: str) -> int:
    """How far up it stands: above everything that it imports."""
    there = {*packages(), *modules()}
    return 1 + max((rank(other) for other in imports(name) & there), default=0)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


if __name__ == "__main__":
    main()
