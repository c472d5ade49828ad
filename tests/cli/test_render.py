"""Tables and help at any width: whole, within the terminal, and aligned by what they hold."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle.bench.results.document import save_results
from peagle.cli import deploy, engines, evaluate, render, train
from peagle.cli.bench import print_results
from peagle.cli.main import app, main
from peagle.deploy.endpoints import EndpointStatus
from peagle.evaluate.contexts import ContextAcceptance
from peagle.evaluate.evaluator import Evaluation
from peagle.evaluate.recall import BEST, GreedyEvaluation, Recall
from peagle.speculation.statistics import SpecDecodeStats
from tests.bench.made import make_cell, make_results, modelled_grid

from .fakes import Shell

SOURCE = Path(render.__file__).parent
WIDTHS = (60, 80, 120)
Capture = pytest.CaptureFixture[str]
Seen = list[tuple[list[str], list[list[str]]]]  # columns and rows of each table


def squeezed(text: str) -> str:
    return "".join(text.split())


def columns_of(printed: str) -> list[tuple[str, str]]:
    """Title and values of each column of each table, all lines of it together, without spaces."""
    found, lines = [], printed.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("┏")]
    for start in starts:
        end = next(n for n in range(start, len(lines)) if lines[n].startswith("└"))
        inner = lines[start + 1 : end]
        split = next(n for n, line in enumerate(inner) if line.startswith("┡"))
        head = [line.strip("┃").split("┃") for line in inner[:split]]
        body = [line.strip("│").split("│") for line in inner[split + 1 :]]
        titles, values = (["".join(map(squeezed, cells)) for cells in zip(*part, strict=True)]
                          for part in (head, body))  # fmt: skip
        found += zip(titles, values, strict=True)
    return found


def assert_whole(printed: str, seen: Seen, width: int) -> None:
    assert all(len(line) <= width for line in printed.splitlines() if line[:1] in "┏┃┡│└")
    assert "…" not in printed
    found = columns_of(printed)
    for columns, rows in seen:
        for column in zip(columns, *rows, strict=True):
            title, values = squeezed(column[0]), "".join(map(squeezed, column[1:]))
            assert (title, values) in found, f"column {column[0]!r} at {width}"


def tune_tables(shell: Shell, folder: Path) -> None:
    path = str(save_results(modelled_grid(loads=(1, 16, 512)), folder))
    price = ("--gpu-dollars-per-hour", "3", "--tokens-per-second", "90000")
    assert shell("tune", path, *price) == 0


def bench_tables(shell: Shell, folder: Path) -> None:
    fast = make_cell("p-eagle", 5, (147_064.0, 139_256.0), workload="a-long-workload.jsonl")
    slow = make_cell(speeds=(958.4, 1255.5), workload="a-long-workload.jsonl", looping=0.2)
    print_results(make_results([slow, fast]), file=sys.stdout)
    print_results(modelled_grid(), file=sys.stdout)


def compare_tables(shell: Shell, folder: Path) -> None:
    a, b = folder / "a", folder / "b"
    save_results(modelled_grid(ks=(3, 5)), a)
    save_results(modelled_grid(ks=(3, 7)), b)
    assert shell("bench", "compare", str(a), str(b)) == 0


def simulate_tables(shell: Shell, folder: Path) -> None:
    path = str(save_results(modelled_grid(), folder))
    assert shell("simulate", "--costs", path, "--acceptance", path) == 0
    assert shell("simulate", "--validate", path) == 0


def demo_tables(shell: Shell, folder: Path) -> None:
    assert shell("demo", "--prompts", "2") == 0


def heads_tables(shell: Shell, folder: Path) -> None:
    assert shell("heads") == 0


def evaluate_tables(shell: Shell, folder: Path) -> None:
    group = []
    for k in range(1, 17):
        group.append(SpecDecodeStats())
        for accepted in range(k + 1):
            group[-1].observe(k, accepted, times=1_234)
    names = ("all", "not_looping", "a_long_category_name")
    result = Evaluation(16, dict.fromkeys(names, group), dict.fromkeys(names, 20))
    recall = Recall([100] * 16, {best: [best * 6] * 16 for best in BEST})
    by_context = ContextAcceptance({"all": group[:6], "not_looping": group[1:7]},
                                   {"all": group[2:8], "not_looping": group[3:9]})  # fmt: skip
    chains = GreedyEvaluation(result, result, {"all": recall}, by_context)
    evaluate._print_acceptance("greedy", result, chains, sys.stdout)
    evaluate._print_trees(result, 16, sys.stdout)
    evaluate._print_contexts("chains of 16", by_context, sys.stdout)


def train_tables(shell: Shell, folder: Path) -> None:
    parts = {"the target's weights and tables": 5 << 30, "optimiser": 1 << 20}
    sizes = SimpleNamespace(parts=parts, total=6 << 30, num_gpus=8)
    train._print_memory("cuda", sizes, sys.stdout)  # type: ignore[arg-type]
    names = ("peak_memory_gib", "tokens_per_second", "waiting_share", "seconds_per_step")
    more = ("forecast_steps", "forecast_minutes", "disk_gib", "disk_free_gib")
    train._print_forecast(dict.fromkeys((*names, *more), 12_345.678), 1.5, "cuda", sys.stdout)


def deploy_tables(shell: Shell, folder: Path) -> None:
    one = EndpointStatus(
        name="a-long-name-of-an-endpoint",
        region="ap-southeast-2",
        status="InService",
        model="openai/gpt-oss-120b",
        drafting="p-eagle, K = 7",
        instance_type="ml.p5en.48xlarge",
        instance_count=12,
        created=datetime(2026, 1, 1, tzinfo=UTC),
        hours=1234.5,
        dollars_per_hour=1234.56,
        end="2026-01-02T03:04:05",
        failure=None,
    )
    render.print_table("Endpoints", deploy.STATUS_COLUMNS, [deploy._status_row(one)])


TABLES: dict[str, Callable[[Shell, Path], None]] = {
    "tune": tune_tables,
    "bench": bench_tables,
    "simulate": simulate_tables,
    "demo": demo_tables,
    "heads": heads_tables,
    "evaluate": evaluate_tables,
    "train": train_tables,
    "deploy": deploy_tables,
}


def test_every_file_that_prints_a_table_is_looked_at() -> None:
    printing = {file.stem for file in SOURCE.glob("*.py")
                if "render.print_table(" in file.read_text(encoding="utf-8")}  # fmt: skip
    assert printing == set(TABLES)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tables", [*TABLES.values(), compare_tables])
def test_every_cell_of_every_table_is_whole(
    shell: Shell,
    tables: Callable[[Shell, Path], None],
    width: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    seen, printed = Seen(), []
    real = render.print_table

    def record(title, columns, rows, *, names=1, file=None):  # type: ignore[no-untyped-def]
        seen.append((list(columns), [list(row) for row in rows]))
        real(title, columns, seen[-1][1], names=names)
        printed.append(capsys.readouterr().out)

    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(render, "print_table", record)
    monkeypatch.setattr(engines, "shipped_heads", lambda: HEADS)
    tables(shell, tmp_path)
    assert len(seen) >= (1 if tables in (demo_tables, compare_tables, deploy_tables) else 2)
    for table, text in zip(seen, printed, strict=True):
        assert_whole(text, [table], width)


HEADS = [
    SimpleNamespace(
        name="smollm2-135m-p-eagle",
        path=Path("/home/somebody/a/rather/long/path/to/site-packages/peagle/heads") / "p-eagle",
        method="p-eagle",
        target="smollm2-135m",
        num_speculative_tokens=7,
    )
]

WORDS = st.text("ab1/-.é", min_size=1, max_size=70)
CELLS = st.lists(WORDS, min_size=0, max_size=4).map(" ".join)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data(), st.integers(1, 7), st.integers(1, 3), st.integers(40, 130), st.integers(1, 3))
def test_no_text_is_cut_whatever_a_table_holds(
    capsys: Capture, data: st.DataObject, size: int, height: int, width: int, names: int
) -> None:
    columns = [f"c{n} {data.draw(st.sampled_from(['', 'tokens/s', 'long name of it']))}"
               for n in range(size)]  # fmt: skip
    rows = [[data.draw(CELLS) for _ in columns] for _ in range(height)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        render.print_table("a title", columns, rows, names=min(names, size))
    printed = capsys.readouterr().out
    for title, values in columns_of(printed):
        (column,) = [c for c in zip(columns, *rows, strict=True) if squeezed(c[0]) == title]
        assert values == "".join(map(squeezed, column[1:]))
    assert {title for title, _ in columns_of(printed)} == {squeezed(c) for c in columns}


def test_numbers_stand_right_and_words_left(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    render.print_table("t", ("name", "number", "word"), [("a", "1", "b"), ("aa", "-", "bb")])
    lines = capsys.readouterr().out.splitlines()
    assert "│ a    │      1 │ b    │" in lines
    assert "│ aa   │      - │ bb   │" in lines


def verbs() -> list[list[str]]:
    root = typer.main.get_command(app)
    found: list[list[str]] = [[]]
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        found.append([name])
        found += [[name, inner] for inner in getattr(command, "commands", {})]
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_help_shows_every_flag_whole(
    verb: list[str], width: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([*verb, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= width
    command = typer.main.get_command(app)
    for name in verb:
        command = command.commands[name]  # type: ignore[attr-defined]
    if verb == ["bench"]:
        command = command.commands["run"]  # type: ignore[attr-defined]
    words = set(re.findall(r"[\w/-]+", printed))
    for parameter in command.params:
        if not getattr(parameter, "hidden", False) and parameter.param_type_name == "option":
            assert {*parameter.opts, *parameter.secondary_opts} <= words


def test_help_of_bench_names_what_else_there_is(capsys: Capture) -> None:
    assert main(["bench", "--help"]) == 0
    assert "peagle bench compare" in capsys.readouterr().out.partition("Beside it")[2]


def test_speeds_are_written_in_one_way() -> None:
    """By `figures`: no file has a format of its own for them."""
    files = [*SOURCE.glob("*.py"), *(SOURCE.parent / "bench").glob("**/*.py")]
    formats = re.compile(r"(otps|gain|speed)[\w.\[\]]*:[,.]\d?")
    assert [file.name for file in files if formats.search(file.read_text())] == []
