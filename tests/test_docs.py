"""Generated pages are fresh, and what the docs name exists: files, links, commands and flags."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import pytest
import typer

from peagle.backends.vllm.options import VllmOptions
from peagle.backends.vllm.released import released_models
from peagle.cli.main import app
from peagle.deploy.config import DeployConfig
from peagle.deploy.plan import make_plan

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"])
RENEW = "stale: run `make docs`"

# `tests/x.py`, `benchmarks/x.json`: a path of the repository in backticks, or a test file's name.
PATH = re.compile(r"`((?:src|tests|docs|benchmarks|recipes|examples|\.ci)/[\w./-]+)`")
TEST = re.compile(r"`(test_\w+\.py)`")
RESULT = re.compile(r"`(\w+_(?:cpu|h200)\.json)`")
NUMBER = re.compile(r"(?<=\| )[\d,]+(?= \|)")  # alone in a cell of a table
HOP = re.compile(r"`([\w/]+\.py): ([\w.]+)`")  # `engine/llm.py: LLM.generate`
HOPS = HOP.findall((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
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


def test_page_of_the_recipe_shows_its_keys_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    page = script("docs/recipe_page.py", monkeypatch)
    assert (ROOT / "docs/recipe.md").read_text(encoding="utf-8") == page.recipe_page(), RENEW


def test_models_page_shows_families_and_sizes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    page = script("docs/models_page.py", monkeypatch)
    assert (ROOT / "docs/models.md").read_text(encoding="utf-8") == page.models_page(), RENEW


def test_table_of_packages_shows_the_sources_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    fresh = script("docs/architecture_table.py", monkeypatch).with_tables(page)
    assert NUMBER.sub("", page) == NUMBER.sub("", fresh), RENEW
    assert numbers(page) == pytest.approx(numbers(fresh), rel=0.2), RENEW


def numbers(text: str) -> list[int]:
    return [int(found.replace(",", "")) for found in NUMBER.findall(text)]


@pytest.mark.parametrize(("file", "names"), HOPS, ids=lambda part: part)
def test_what_a_walk_through_the_code_names_is_there(file: str, names: str) -> None:
    path = ROOT / "src/peagle" / file
    assert path.is_file()
    scope: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for name in names.split("."):
        (found,) = [node for node in scope if getattr(node, "name", None) == name]
        scope = getattr(found, "body", [])


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


@pytest.mark.parametrize("name", released_models())
def test_the_page_of_deployments_says_which_instance_a_pair_runs_on(name: str) -> None:
    page = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    known_as = released_models()[name].jumpstart_id
    jumpstart = f"`{known_as}`" if known_as else "none found"
    plan = make_plan(
        name,
        DeployConfig(),
        region="us-east-1",
        drafter={},
        options=VllmOptions(),
        now=datetime.now(UTC),
    )
    assert f"| `{name}` | {jumpstart} | {plan.instance_type} |\n" in page


def test_trees_and_what_the_engine_chooses_have_rows_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = script("benchmarks/results_page.py", monkeypatch)
    report = page.bench_report(page.H200)
    everything = page.readme_table()
    for words in ("HumanEval, P-EAGLE trees", "HumanEval, P-EAGLE, auto"):
        (row,) = [r for r in everything.splitlines() if words in r]
        assert row.count("x)") == 4, "of each number of streams"
    chains = report | {
        "cells": [c for c in report["cells"] if not (c.get("num_draft_nodes") or c.get("is_auto"))]
    }
    monkeypatch.setattr(page, "bench_report", lambda name: chains if name == page.H200 else report)
    monkeypatch.setattr(page, "peagle", lambda *_: {"by_load": []})
    assert "trees |" not in page.readme_table()


def test_a_repeat_that_captured_graphs_counts_only_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = script("benchmarks/results_page.py", monkeypatch)
    repeats = [{"otps": 900.0, "num_compiled": 4}, {"otps": 20000.0, "num_compiled": 0}]
    assert page.steady_speeds({"repeats": repeats}) == {1: 20000.0}
    assert page.steady_speeds({"repeats": repeats[:1]}) == {0: 900.0}


def test_picture_says_what_was_measured_and_shows_one_answer_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plot = script("benchmarks/speed_plot.py", monkeypatch)
    shown = plot.answer()
    assert "".join(shown.plain) == "".join(shown.drafted)
    assert len(shown.drafted) < len(shown.plain)
    for drawing in plot.images().values():
        for words in ("SmolLM2-135M", "HumanEval", "NVIDIA H200", "bfloat16", "times as fast"):
            assert words in drawing
        assert f"{len(shown.drafted)} passes" in drawing
    monkeypatch.setattr(plot, "answer", lambda: plot.Answer([], []))
    assert all("passes" in drawing for drawing in plot.images().values()), "in the headline alone"


def test_readme_says_how_sure_its_figures_are(monkeypatch: pytest.MonkeyPatch) -> None:
    page = script("benchmarks/results_page.py", monkeypatch)
    repeats = page.bench_report(page.H200)["manifest"]["num_repeats"]
    assert f"Medians of {repeats} repeats; 95 % intervals of gains: ±" in page.readme_table()
    once = page.bench_report(page.H200) | {"manifest": {"num_repeats": 1}}
    once["cells"] = [cell | {"repeats": cell["repeats"][:1]} for cell in once["cells"]]
    assert page.how_sure(once) == "1 repeat of each cell: too few for intervals."
