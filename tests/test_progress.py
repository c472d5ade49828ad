"""Long work tells how far it is: bars on a terminal, lines in a pipe, nothing with -q."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.cli import progress as shown
from peagle.cli.progress import Lines, duration_in_words, status_of
from peagle.progress import Work, shown_by, track
from tests.tiny.displays import Remembering


def test_without_a_display_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with track("working", 2) as work:
        work.advance()
    assert work.done == 1
    assert capsys.readouterr() == ("", "")


def test_work_ends_on_its_display_even_if_it_fails() -> None:
    display = Remembering()
    with shown_by(display), pytest.raises(ZeroDivisionError), track("outer"), track("inner", 3):
        raise ZeroDivisionError
    assert [work.label for work in display.ended] == ["inner", "outer"]
    assert not display.open


def test_a_rate_counts_what_this_run_did_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("peagle.progress.monotonic", lambda: clock[0])
    work = Work("training", 1000, "steps", done=900, started=100.0)
    assert (work.rate, work.time_left) == (None, None)
    clock[0] += 10
    work.reach(920)
    assert (work.rate, work.time_left) == (2.0, 40.0)
    assert status_of(work) == "920 of 1,000 steps, 2/s, 40 s left"
    work.reach(1000, "step 1000")
    assert status_of(work) == "1,000 of 1,000 steps, 10/s, step 1000"


@given(st.integers(0, 10**10).map(lambda n: n / 1000), st.floats(0.1, 1e7), st.floats(0.001, 1e6))
def test_a_status_is_one_line_whatever_the_numbers(done: float, total: float, ago: float) -> None:
    work = Work("x", total, "MB", started=time.monotonic() - ago)
    work.reach(done)
    status = status_of(work)
    assert "\n" not in status
    assert status.startswith(f"{done:,.0f} of " if done == int(done) else f"{done:,.1f} of ")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (89, "89 s"), (600, "10 min"), (11_100, "3 h 05 min")]
)
def test_durations_are_words(seconds: float, words: str) -> None:
    assert duration_in_words(seconds) == words


def test_lines_come_at_intervals_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    for module in ("peagle.progress", "peagle.cli.progress"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: clock[0])
    with shown_by(Lines()), track("answering", 100, "prompts") as work:
        work.started = 0.0
        for second in range(1, 16):
            clock[0] = float(second)
            work.advance()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" of")[0] for line in lines] == [f"answering: {n}" for n in (2, 12, 15)]
    assert lines[0] == "answering: 2 of 100 prompts, 1/s, 2 min left"


def test_short_work_has_no_line_and_work_of_unknown_length_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with shown_by(Lines()), track("quick", 2) as work, track("compiling"):
        work.advance(2)
    assert capsys.readouterr().err == "compiling\n"


WORK = """
import logging, sys, time
from peagle.cli.progress import shown_progress
from peagle.cli import render
from peagle.log import setup_logging
from peagle.progress import track
setup_logging(int(sys.argv[1]))
with shown_progress(), track("working", 4, "rows") as work:
    for row in range(4):
        time.sleep(0.15)
        work.advance(note="as it goes")
        logging.getLogger("peagle").warning("warned of row %d", row)
        print("row", row, flush=True)
render.note("remark")
"""


def test_a_terminal_sees_a_bar_that_goes_away_and_stdout_stays_data() -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", WORK, "0"],
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(slave)
    out, _ = process.communicate(timeout=30)
    seen = b""
    while select.select([master], [], [], 0.2)[0]:
        try:
            seen += os.read(master, 65536)
        except OSError:  # the other end is closed and all is read
            break
    os.close(master)
    assert out == "row 0\nrow 1\nrow 2\nrow 3\n"
    text = seen.decode()
    assert "working" in text
    assert "of 4 rows" in text
    assert "as it goes" in text
    assert text.rstrip().endswith("remark")
    assert "\x1b[2K" in text, "the bar is erased"
    logged = [line for line in text.splitlines() if "warned of row" in line]
    assert len(logged) == 4
    assert not any("of 4 rows" in line.split("WARNING")[1] for line in logged), "above the bar"


@pytest.mark.parametrize(("verbosity", "said"), [("0", ["remark\n"]), ("-1", [])])
def test_a_pipe_sees_no_bar_and_quiet_means_quiet(verbosity: str, said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORK, verbosity], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "row 0\nrow 1\nrow 2\nrow 3\n"
    assert [line for line in done.stderr.splitlines(True) if "WARNING" not in line] == said


def test_only_the_first_process_of_torchrun_shows_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with shown.shown_progress(), track("compiling"):
        pass
    assert capsys.readouterr().err == ""
