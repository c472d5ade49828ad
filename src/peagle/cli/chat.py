"""`peagle chat`: a conversation with streamed answers."""

from __future__ import annotations

import signal
import sys
import time
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

HELP = "/reset starts afresh, /exit or Ctrl-D ends, Ctrl-C cancels an answer"


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
    render.note(HELP)
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
        if line == "/reset":
            history.clear()
            render.note("the conversation starts afresh")
            continue
        history.append({"role": "user", "content": line})
        try:
            answer = _answer(llm, with_system(history, system), params)
        except RequestError as error:
            render.print_error(error.message, error.hint or "/reset starts afresh")
            answer, failed = "", True
        if answer:
            history.append({"role": "assistant", "content": answer})
        else:
            history.pop()  # templates want roles to alternate: no answer, no question
    return failed


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
    with _interrupt_flag() as interrupted:
        stream = llm.stream(request, params)
        for result in stream:
            render.write(result.outputs[0].text[len(text) :])
            text = result.outputs[0].text
            if interrupted:
                stream.close()
                break
    render.write("\n")
    if result is None:
        return text
    if result.outputs[0].finish_reason == "error":
        raise RequestError(result.outputs[0].error or "the engine gave no reason")
    num_tokens = len(result.outputs[0].token_ids)
    cancelled = "cancelled: " if interrupted else ""
    seconds = time.perf_counter() - start
    render.note(f"[{cancelled}{render.stats_line(num_tokens, seconds, result.stats)}]")
    return text


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
