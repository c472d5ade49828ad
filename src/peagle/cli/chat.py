"""`peagle chat`: a conversation with streamed answers."""

from __future__ import annotations

import difflib
import shutil
import signal
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from peagle.cli import engines, render
from peagle.cli.flags import Model, System, expand_flags
from peagle.cli.flags.drafter import DrafterFlags
from peagle.cli.flags.engine import EngineFlags
from peagle.cli.flags.sampling import SamplingFlags
from peagle.data.prompts import Message, with_system
from peagle.errors import ConfigError, RequestError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.outputs import RequestOutput

COMMANDS = {"/help": "this list", "/reset": "start a new conversation", "/exit": "end the chat"}
GREETING = "/help lists the commands; Ctrl-D ends the chat"
KEYS = {"Ctrl-C": "stop the answer; at an empty line: end the chat", "Ctrl-D": "end the chat"}
HELP = "\n".join(f"{name:7} {what}" for name, what in (COMMANDS | KEYS).items())


@expand_flags
def chat(
    model: Model,
    sampling: SamplingFlags,
    drafter: DrafterFlags,
    engine: EngineFlags,
    system: System = None,
) -> None:
    """Chat with a model; lines come from the terminal or a pipe."""
    params = sampling.params()
    llm = engines.build_llm(model, engine.config(), drafter.config())
    if not llm.get_tokenizer().chat_template:
        raise ConfigError(
            f"{model} has no chat template", hint="use peagle generate MODEL PROMPT --raw"
        )
    render.note(GREETING)
    failed = _converse(llm, params, system)
    if failed and not sys.stdin.isatty():
        raise typer.Exit(2)


def _converse(llm: LLM, params: SamplingParams, system: str | None) -> bool:
    """Answers line by line until the end of input; True if a line got no answer."""
    history: list[Message] = []
    failed = False
    for line in _lines():
        if line == "/exit":
            break
        if line.startswith("/"):
            failed |= not _obey(line, history)
            continue
        history.append({"role": "user", "content": line})
        try:
            answer = _answer(llm, with_system(history, system), params)
        except RequestError as error:
            render.print_error(error.message, "/reset starts a new conversation")
            answer, failed = "", True
        if answer:
            history.append({"role": "assistant", "content": answer})
        else:
            history.pop()  # templates want roles to alternate: no answer, no question
    return failed


def _obey(line: str, history: list[Message]) -> bool:
    """A line that begins with a slash is for us; False if we do not know it."""
    if line == "/help":
        render.note(HELP)
    elif line == "/reset":
        history.clear()
        render.note("this is a new conversation")
    else:
        nearest = difflib.get_close_matches(line, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(COMMANDS)}"
        render.print_error(f"{line.split()[0]} is not a command", hint)
        return False
    return True


def _lines() -> Iterator[str]:
    """What the user types, without blank lines; the terminal's prompt goes to no pipe."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        import readline  # noqa: F401  gives input() line editing and history
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except EOFError:
            return
        except UnicodeDecodeError:
            raise ConfigError("stdin is not UTF-8", hint="convert the text to UTF-8") from None
        if not interactive and not line:
            return
        if line.strip():
            yield line.strip()


def _answer(llm: LLM, messages: list[Message], params: SamplingParams) -> str:
    """Streams one answer to stdout; cancelled by Ctrl-C, the text so far is the answer."""
    request = llm.render_chat(messages)
    start = time.perf_counter()
    text, result = "", None
    shown = WrappedText(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    with _interrupt_flag() as interrupted:
        stream = llm.stream(request, params)
        for result in stream:
            render.write(shown.add(result.outputs[0].text[len(text) :]))
            text = result.outputs[0].text
            if interrupted:
                stream.close()
                break
    render.write(f"{shown.end()}\n")
    if result is None:
        return text
    if result.outputs[0].finish_reason == "error":
        raise RequestError(result.outputs[0].error or "the engine gave no reason")
    num_tokens = len(result.outputs[0].token_ids)
    ending = "cancelled: " if interrupted else _cut(result, params)
    seconds = time.perf_counter() - start
    render.note(f"[{ending}{render.stats_line(num_tokens, seconds, result.stats)}]")
    return text


class WrappedText:
    """Text that arrives in pieces, broken between words where a line of the terminal ends. A word
    waits for its end where it might not fit. Width None: nothing is broken."""

    def __init__(self, width: int | None) -> None:
        self.width = width
        self._column = 0
        self._word = ""
        self._first = True  # the line has no space yet, so nothing is gained by a break

    def add(self, text: str) -> str:
        """-> what can be shown now."""
        return text if self.width is None else "".join(map(self._add, text))

    def end(self) -> str:
        word, self._word = self._word, ""
        size = sum(map(_cells, word))
        breaks = bool(word) and not self._first and not self._fits(size)
        if breaks:
            self._start_line()
        self._column += size
        while not self._fits(0):  # the terminal breaks a word that is longer than a line
            self._column -= self.width or self._column
        return "\n" + word if breaks else word

    def _add(self, character: str) -> str:
        if character.isspace():
            return self.end() + self._space(character)
        self._word += character
        stands_alone = _cells(character) == 2  # Chinese has no spaces to wait for
        return self.end() if self._first or stands_alone else ""

    def _space(self, character: str) -> str:
        if character == "\n":
            self._start_line()
            return character
        size = 8 - self._column % 8 if character == "\t" else 1
        self._first = False
        if not self._fits(size):
            return ""  # the line ends here anyway
        self._column += size
        return character

    def _start_line(self) -> None:
        self._column, self._first = 0, True

    def _fits(self, size: int) -> bool:
        return self.width is None or self._column + size <= self.width


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _cut(result: RequestOutput, params: SamplingParams) -> str:
    """What ended an answer that the model had not ended itself."""
    answer = result.outputs[0]
    if answer.finish_reason != "length":
        return ""
    if params.max_tokens is not None and len(answer.token_ids) >= params.max_tokens:
        return f"cut at --max-tokens {params.max_tokens}: "
    return "cut, the context is full (/reset starts a new conversation): "


@contextmanager
def _interrupt_flag() -> Iterator[list[int]]:
    """A list that Ctrl-C fills, so that an engine step is never torn; a second one does raise."""
    hits: list[int] = []

    def on_interrupt(number: int, _frame: object) -> None:
        if hits:
            raise KeyboardInterrupt
        hits.append(number)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield hits
    finally:
        signal.signal(signal.SIGINT, before)
