"""`peagle chat`: history, commands, and what Ctrl-C ends."""

from __future__ import annotations

import io
import itertools
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.cli.chat import WrappedText

from .fakes import ANSWER, CONTEXT, FakeLLM, Shell

Say = Callable[..., None]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Lines for stdin."""

    def pipe(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return pipe


def test_answers_are_streamed_and_remembered(shell: Shell, say: Say) -> None:
    say("a", "b")
    assert shell("chat", "m", "--spec-method", "ngram") == 0
    assert shell.out == f"{ANSWER}\n{ANSWER}\n"
    assert shell.llm.requests == ["<user>a", f"<user>a<assistant>{ANSWER}<user>b"]
    assert shell.err.count("tokens/s; mean acceptance length 3.00") == 2


def test_reset_forgets_and_exit_ends(shell: Shell, say: Say) -> None:
    say("a", "/reset", "", "b", "/exit", "c")
    assert shell("chat", "m", "--system", "S") == 0
    assert shell.llm.requests == ["<system>S<user>a", "<system>S<user>b"]


def test_end_of_input_ends_with_0(shell: Shell, say: Say) -> None:
    say()
    assert shell("chat", "m") == 0


def test_ctrl_c_cancels_the_answer_and_the_chat_goes_on(shell: Shell, say: Say) -> None:
    shell.make = partial(FakeLLM, interrupt_at=4)
    say("a", "b")
    assert shell("chat", "m") == 0
    assert shell.out == "one \none \n"
    assert shell.llm.num_closed == 2
    assert "cancelled" in shell.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_at_the_prompt_exits_130(
    shell: Shell, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(io.StringIO):
        def readline(self, *_: object) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert shell("chat", "m") == 130


def test_a_line_that_is_too_long_is_an_error_and_is_forgotten(shell: Shell, say: Say) -> None:
    say("x" * CONTEXT, "b")
    assert shell("chat", "m") == 2
    assert "longer than the context" in shell.err
    assert shell.llm.requests == ["<user>b"]


def test_model_without_a_template_cannot_chat(shell: Shell, say: Say) -> None:
    shell.make = partial(FakeLLM, chat_template=None)
    assert shell("chat", "m") == 2
    assert "hint: use peagle generate" in shell.err


def test_help_lists_the_commands_and_others_are_refused(shell: Shell, say: Say) -> None:
    say("/help", "/rest", "/nothing like it", "a")
    assert shell("chat", "m") == 2
    assert "/reset  start a new conversation\n" in shell.err
    assert "Ctrl-C  stop the answer" in shell.err
    assert "error: /rest is not a command\nhint: did you mean /reset?" in shell.err
    assert "error: /nothing is not a command\nhint: known: /help, /reset, /exit" in shell.err
    assert shell.llm.requests == ["<user>a"]


def test_an_answer_that_was_cut_is_marked(shell: Shell, say: Say) -> None:
    say("a")
    assert shell("chat", "m", "--max-tokens", str(len(ANSWER))) == 0
    assert f"[cut at --max-tokens {len(ANSWER)}: " in shell.err
    say("a")
    assert shell("chat", "m") == 0
    assert "[cut, the context is full (/reset starts a new conversation): " in shell.err


def test_a_full_context_points_to_reset(shell: Shell, say: Say) -> None:
    say("x" * CONTEXT)
    assert shell("chat", "m") == 2
    assert "hint: /reset starts a new conversation" in shell.err


TEXT = st.text(st.sampled_from("aaaab \n\t語é"), max_size=60)


@given(text=TEXT, width=st.integers(4, 12), data=st.data())
def test_words_are_whole_and_lines_fit_the_terminal(
    text: str, width: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    shown, whole = WrappedText(width), WrappedText(width)
    wrapped = "".join(map(shown.add, pieces)) + shown.end()
    assert wrapped == whole.add(text) + whole.end()  # however the text arrives
    assert "".join(wrapped.split()) == "".join(text.split())
    written = [word for word in text.replace("語", " 語 ").split() if len(word) <= width]
    lines = wrapped.replace("語", " 語 ").split("\n")
    assert Counter(written) <= Counter(word for line in lines for word in line.split())
    for line in wrapped.expandtabs(8).split("\n"):
        too_long = len(line) + line.count("語") > width
        assert not too_long or " " not in line  # a word longer than a line


def test_a_word_waits_only_where_it_might_not_fit() -> None:
    shown = WrappedText(10)
    assert [shown.add(piece) for piece in ("On", "e", " tw", "o", " three", " 語")] == [
        "On",
        "e",
        " ",
        "",
        "two ",
        "\nthree 語",
    ]
    assert shown.end() == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_gets_broken_lines(
    shell: Shell, say: Say, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "9")
    say("a")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert shell("chat", "m") == 0
    assert shell.out == ("one two \nthree\n" if is_terminal else "one two three\n")


def test_a_flag_that_is_unlike_any_other_is_not_mistaken_for_one(shell: Shell) -> None:
    assert shell("chat", "m", "--json") == 2
    assert "No such option: --json" in shell.err
    assert "did you mean" not in shell.err
    assert shell("chat", "m", "--max-token", "3") == 2
    assert "did you mean --max-tokens?" in shell.err
