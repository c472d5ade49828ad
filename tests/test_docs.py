"""Generated pages are fresh, and what the docs name exists: files, links, commands and flags."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer

from peagle.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"])
RENEW = "stale: run `make docs`"

# `tests/x.py`, `benchmarks/x.json`: a path of the repository in backticks, or a test file's name.
PATH = re.compile(r"`((?:src|tests|docs|benchmarks|recipes|examples|\.ci)/[\w./-]+)`")
TEST = re.compile(r"`(test_\w+\.py)`")
RESULT = re.compile(r"`(\w+_(?:cpu|h200)\.json)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)")


def script(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module; those in one folder import each other by name."""
    file = ROOT / path
    monkeypatch.syspath_prepend(str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    return module


def test_results_page_and_readme_table_hold_the_figures_of_the_result_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = script("benchmarks/results_page.py", monkeypatch)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (ROOT / "docs/results.md").read_text(encoding="utf-8") == page.results_page(), RENEW
    assert readme == page.with_table(readme), RENEW


def test_plot_shows_the_figures_of_the_result_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, drawing in script("benchmarks/speed_plot.py", monkeypatch).images().items():
        assert (ROOT / "docs/images" / name).read_text(encoding="utf-8") == drawing, RENEW


@pytest.mark.slow
def test_command_line_page_shows_the_commands_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    page = script("docs/cli_page.py", monkeypatch)
    assert (ROOT / "docs/cli.md").read_text(encoding="utf-8") == page.cli_page(), RENEW


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = [page.parent / link for link in LINK.findall(text) if "://" not in link]
    files += [ROOT / path for path in PATH.findall(text) if "*" not in path]
    files += [ROOT / "benchmarks/results" / name for name in RESULT.findall(text)]
    assert [str(f) for f in files if not f.exists()] == []
    assert [name for name in TEST.findall(text) if not list(ROOT.glob(f"tests/**/{name}"))] == []


def commands(page: Path) -> Iterator[list[str]]:
    """Command lines of ours in indented or fenced blocks, as words up to a comment or a bare --."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^\s*(?:\$ |node \d\$ )?peagle (.+)$", text, re.MULTILINE):
        words = line.split("#")[0].split()
        yield words[: words.index("--")] if "--" in words else words


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_flags_that_a_page_shows_exist(page: Path) -> None:
    wrong = []
    for words in commands(page):
        command, verbs = typer.main.get_command(app), list(words)
        # typer brings its own click: a group is known by its commands.
        while verbs and verbs[0] in getattr(command, "commands", {}):
            command = command.commands[verbs.pop(0)]
        command = getattr(command, "commands", {}).get(
            "run", command
        )  # `bench` alone is `bench run`
        flags = {flag for parameter in command.params for flag in parameter.opts}
        flags |= {flag for parameter in command.params for flag in parameter.secondary_opts}
        asked = {word.split("=")[0] for word in words if word.startswith("--")}
        has_verb = len(verbs) < len(words) or words[0].startswith(("-", "["))
        if not has_verb or asked - flags - {"--help"}:
            wrong.append(" ".join(words))
    assert wrong == []
