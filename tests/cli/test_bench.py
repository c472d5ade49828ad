"""`peagle bench` on the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from peagle.bench.results.document import Cell, save_results
from peagle.cli.bench import print_results
from tests.bench.made import make_cell, make_lossless, make_results

from .fakes import Shell

FAST = ("--device", "cpu", "--max-tokens", "6", "--num-prompts", "3", "--repeats", "2")


@pytest.mark.slow
def test_grid_prints_a_table_and_ends_with_json(
    command: Shell, model: str, head: str, prompts: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    drafters = ("--spec-model", head, "--spec-tokens", "2")
    shown = ("bench", model, *FAST, *drafters, "--workload", prompts, "--out", str(out), "--json")
    assert command(*shown) == 0
    assert [c["method"] for c in command.json["cells"]] == ["none", "p-eagle"]
    assert command.json == json.loads((out / "results.json").read_text())
    assert len(command.out.splitlines()) == 1
    assert "[4/4]" in command.err
    assert "0 s left" in command.err
    assert "Same output: all 6 greedy answers with speculation equal plain" in command.err
    assert command(*shown[:-1]) == 0
    assert "speed-up" in command.out
    assert "4 of 4 runs are there already" in command.err


def test_flags_win_over_the_file(command: Shell, model: str, prompts: str, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(
        f"model: {model}\nworkload: {prompts}\nout: {tmp_path / 'a'}\nmax-tokens: 4\nrepeats: 1\n"
        "device: cpu\nnum_prompts: 2\n"
    )
    assert command("bench", "--config", str(file), "--max-tokens", "5", "--json") == 0
    assert command.json["manifest"]["max_tokens"] == 5
    assert command.json["manifest"]["workloads"][0]["num_prompts"] == 2


def test_unknown_key_of_a_file_names_the_nearest(command: Shell, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text("model: m\nout: o\nconcurency: 4\n")
    assert command("bench", "--config", str(file)) == 2
    assert "unknown key 'concurency'" in command.err
    assert "did you mean 'concurrency'" in command.err


def test_bad_rows_are_named_and_raw_prompts_warned_about(
    command: Shell, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "good"}\n{"prompt": 3}\n')
    arguments = ("bench", model, *FAST, "--workload", str(file), "--out", str(tmp_path / "o"))
    assert command(*arguments, "--raw", "--json") == 0
    assert "skipped rows.jsonl:2: no prompt in it" in command.err
    assert "warning: raw prompts" in command.err
    assert command.json["manifest"]["workloads"][0]["num_bad"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("m",), "does not set out"),
        (("--out", "o"), "does not set model"),
        (("m", "--out", "o", "--backend", "http://127.0.0.1:9"), "gives no answer"),
        (("m", "--out", "o", "--workload", "/no/such.jsonl"), "no prompts at /no/such.jsonl"),
        (("m", "--out", "o", "--workload", "offlin"), "workload offlin: no prompts"),
        (("m", "--out", "o", "--spec-tokens", "3"), "no drafter"),
    ],
)
def test_bad_input_is_one_line(
    command: Shell,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("bench", *arguments) == 2
    lines = command.err.splitlines()
    assert message in lines[0]
    assert len(lines) <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "file/o"), "cannot write to file/o: Not a directory"),
        (("--out", "o", "--device", "abacus"), "--device 'abacus' is unknown"),
        (("--out", "o", "--backend", "http://127.0.0.1:9", "--workload", "/no"), "no answer"),
    ],
)
def test_what_needs_no_model_is_found_before_one_is_read(
    command: Shell, arguments: tuple[str, ...], message: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert command("bench", "/missing", *arguments) == 2
    assert message in command.err.splitlines()[0]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_failures_are_named_but_not_all(capsys: pytest.CaptureFixture[str]) -> None:
    broken = make_cell("p-eagle", 3, (90.0, 91.0), partial=True)
    errors = [replace(run, errors=[f"p{n}: gone" for n in range(9)]) for run in broken.repeats]
    results = make_results([make_cell(), replace(broken, repeats=errors)], partial=True)
    print_results(replace(results, lossless=make_lossless(8)), file=sys.stdout)
    out = capsys.readouterr().out
    assert out.count("failed: p") == 5
    assert "and 4 more: results.json has them" in out
    assert "Same output up to rounding" in out
    assert "With speculation 8 of 240 greedy answers differ from plain decoding's" in out
    assert "p-eagle K=5 at 4, q0, turn 1, token 18: ' the' for ' a'" in out
    assert "and 3 more: peagle report shows them" in out
    assert "p-eagle (partial)" in out
    assert "partial: not every run" in out


@pytest.mark.slow
def test_sampled_answers_are_not_compared(
    command: Shell, model: str, prompts: str, tmp_path: Path
) -> None:
    work = ("--workload", prompts, "--out", str(tmp_path), "--temperature", "1", "--json")
    assert command("bench", model, *FAST, *work, "--spec-method", "ngram") == 0
    assert command.json["lossless"] is None


def test_a_different_answer_is_an_error_where_kernels_are_batch_invariant(
    command: Shell, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    differing = replace(make_results([make_cell()]), lossless=make_lossless(2))
    monkeypatch.setattr("peagle.bench.run.bench.bench", lambda *_: differing)
    shown = ("bench", model, "--out", str(tmp_path))
    assert command(*shown, "--batch-invariant") == 1
    assert "2 answers differ despite --batch-invariant" in command.err
    assert command(*shown) == 0


def test_a_comparison_says_of_each_column_what_is_worse(
    command: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    def with_length(cell: Cell, length: float) -> Cell:
        stats = {"num_drafts": 100, "mean_acceptance_length": length}
        return replace(cell, repeats=[replace(run, stats=stats) for run in cell.repeats])

    old, new = (43.9, 39.0), (28.4, 28.2)  # noise is not known from two
    alone = [make_cell("eagle3", k) for k in range(1, 9)]
    a = [with_length(make_cell("p-eagle", 3, old), 2.26), make_cell(speeds=(9.0, 9.1, 9.2)), *alone]
    b = [with_length(make_cell("p-eagle", 3, new), 2.16), make_cell(speeds=(6.0, 6.1, 6.2))]
    for name, cells in (("a", a), ("b", b)):
        save_results(make_results(cells), tmp_path / name)
    assert command("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")) == 1
    rows = [line.split("│") for line in command.out.splitlines() if line.startswith("│ ")]
    speed = {row[1].strip(): row[-3].strip() for row in rows}
    accepted = {row[1].strip(): row[-2].strip() for row in rows}
    assert speed["p-eagle"] == "0.68x (2 repeats) unknown"
    assert accepted["p-eagle"] == "2.26 to 2.16 WORSE"
    assert speed["none"].endswith("WORSE")
    assert accepted["none"] == "-"
    assert "2 of 2 cells worse beyond noise: 1 in speed, 1 in acceptance" in command.out
    (line,) = [line for line in command.out.splitlines() if line.startswith("only in A")]
    assert line.startswith("only in A: 8 cells: eagle3 (smollm2-135m-eagle3) K=1, chat at 1;")
    assert line.endswith("and 5 more")


def test_a_busy_machine_is_one_word_beside_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [replace(run, other_cpu_share=0.5) for run in make_cell().repeats]
    print_results(make_results([replace(make_cell(), repeats=runs)]), file=sys.stdout)
    out = capsys.readouterr().out
    assert "none (busy)" in out
    assert "Busy machine: during 3 of 3 runs others took up to 50% of the CPU time." in out


def test_two_repeats_are_shown_by_their_range(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cells = [make_cell(speeds=(79_028.0, 67_537.0)), make_cell("p-eagle", 3, (144e3, 145e3))]
    print_results(make_results(cells), file=sys.stdout)
    out = capsys.readouterr().out
    assert "73,000 (68,000 to 79,000)" in out
    assert "1.98x (2 repeats)" in out
    assert "±" not in out
