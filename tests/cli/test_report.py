"""`peagle report`: where the files go, and what is said of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peagle.bench.results.document import save_results
from peagle.cli.main import main
from tests.bench.made import make_cell, make_results, make_samples

from .fakes import Shell


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cells = [make_cell(), make_cell("p-eagle", 5, (150.0, 151.0, 149.0))]
    save_results(make_results(cells, samples=make_samples()), tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_report_lies_beside_the_results(shell: Shell, folder: Path) -> None:
    assert shell("report", str(folder)) == 0
    assert shell.out.strip() == str(folder / "report.html")
    assert "<!doctype html>" in (folder / "report.html").read_text()
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "results.json"]


@pytest.mark.slow
def test_it_goes_where_it_is_told_with_plots_beside_it(shell: Shell, folder: Path) -> None:
    out = folder / "deep" / "page.html"
    results = str(folder / "results.json")
    assert shell("report", results, "--out", str(out), "--png", "--json") == 0
    assert shell.json["report"] == str(out)
    plots = [Path(plot) for plot in shell.json["plots"]]
    assert [plot.name for plot in plots] == ["speed_up.png", "latency_chat.png"]
    assert all(plot.parent == out.parent and plot.is_file() for plot in plots)
    assert not (folder / "report.html").exists()


def test_a_users_error_is_one_line(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"manifest": 1, "version": 99}')
    for path, message in (
        (tmp_path / "missing", "no results"),
        (tmp_path, "version 99"),
    ):
        assert shell("report", str(path)) == 2
        assert message in shell.err
        assert shell.err.count("error:") == 1


def test_a_pipe_is_refused_before_anything_is_drawn(
    shell: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.bench.report.page.build_page", None)
    os.mkfifo(folder / "pipe")
    assert shell("report", str(folder), "--out", str(folder / "pipe")) == 2
    assert "not a regular file" in shell.err
    assert "hint: name a file" in shell.err
    assert (folder / "pipe").is_fifo()


def test_a_missing_matplotlib_says_how_to_get_it(
    shell: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert shell("report", str(folder)) == 2
    assert "peagle[plots]" in shell.err
    assert not (folder / "report.html").exists()


def test_help_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--help"]) == 0
    assert "--png" in capsys.readouterr().out
