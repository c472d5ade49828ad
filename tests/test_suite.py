"""The tests themselves: each asserts something, and each mutant can still be made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, Mutant, problems

TESTS = Path(__file__).parent
CHECKS = ("assert", "check", "raises", "agree", "fail")  # how functions that assert are named


def functions(file: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node


def asserts(function: ast.FunctionDef) -> bool:
    nodes = list(ast.walk(function))
    called = [ast.unparse(node.func).split(".")[-1] for node in nodes if isinstance(node, ast.Call)]
    named = any(name.lstrip("_").startswith(CHECKS) for name in called)
    return named or any(isinstance(node, ast.Assert) for node in nodes)


def test_every_test_asserts_something() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    found = [f"{file.name}: {f.name}" for file in files for f in functions(file) if not asserts(f)]
    assert found == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.file)
def test_a_mutant_can_be_made_of_the_source_as_it_is(mutant: Mutant) -> None:
    assert problems(mutant) == []
