"""What a verb prints: data to stdout, the rest to stderr. rich is loaded when a table is."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import IO, Any

from peagle.errors import PeagleError
from peagle.log import is_quiet
from peagle.speculation.statistics import SpecDecodeStats

PIPE_WIDTH = 120  # of tables where there is no terminal to ask


def print_error(message: str, hint: str | None = None) -> None:
    """One line, whatever the message holds, and the hint on its own."""
    sys.stderr.write(f"{_red('error:')} {as_flags(' '.join(message.split()))}\n")
    if hint:
        sys.stderr.write(f"hint: {as_flags(' '.join(hint.split()))}\n")
    sys.stderr.flush()


def _red(text: str) -> str:
    """On a terminal, unless NO_COLOR is set."""
    is_plain = not sys.stderr.isatty() or os.environ.get("NO_COLOR")
    return text if is_plain else f"\033[1;31m{text}\033[0m"


def as_flags(text: str) -> str:
    """`max_model_len=9 is out of range` -> `--max-model-len 9 is out of range`: an error names
    options as Python has them, and whoever typed flags knows them by those."""
    flags = _typed.get(None) or {}
    names = "|".join(sorted(flags, key=len, reverse=True))

    def flag(match: re.Match[str]) -> str:
        name, assigned = match.groups()
        is_option = assigned or "_" in name  # `seed` alone is a word
        return f"{flags[name]}{' ' if assigned else ''}" if is_option else match[0]

    # Neither `head.max_tokens` of a recipe, nor a part of a call, a path, a JSON text or a word.
    pattern = rf"(?<![\w./'\"(-])({names})\b(?![\w./'\"(-])(=?)"
    return re.sub(pattern, flag, text) if flags else text


_typed: ContextVar[dict[str, str]] = ContextVar("typed")  # flags of the verb that runs


@contextmanager
def naming_flags(flags: dict[str, str]) -> Iterator[None]:
    """Errors inside name options by these flags, by option."""
    token = _typed.set(flags)
    try:
        yield
    except PeagleError as error:
        error.message = as_flags(error.message)
        error.hint = as_flags(error.hint) if error.hint else None
        raise
    finally:
        _typed.reset(token)


def note(text: str) -> None:
    """A remark, unless the user asked for quiet."""
    if not is_quiet():
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def write(text: str) -> None:
    """Data, at once: a reader of a stream must not wait for a buffer to fill."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(document: Any) -> None:
    """The last line of stdout."""
    write(json.dumps(document, ensure_ascii=False) + "\n")


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    file: IO[str] | None = None,
) -> None:
    """The first column is a name, the others are values and stand right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    file = file or sys.stdout
    Console(file=file, width=None if file.isatty() else PIPE_WIDTH).print(table)


def stats_line(num_tokens: int, seconds: float, stats: SpecDecodeStats) -> str:
    """`128 tokens in 2.0 s, 64.0 tokens/s; mean acceptance length 2.31, per position 0.7 0.4`."""
    line = f"{num_tokens} tokens in {seconds:.1f} s, {rate(num_tokens, seconds):.1f} tokens/s"
    if not stats.num_drafts:
        return line
    positions = " ".join(f"{share:.2f}" for share in stats.per_position_acceptance)
    length = stats.mean_acceptance_length
    line = f"{line}; mean acceptance length {length:.2f}, per position {positions}"
    expected = stats.expected_acceptance_length
    if expected is None:
        return line
    return f"{line}; {stats.mean_draft_tokens:.1f} drafts per step, {expected:.2f} was expected"


def rate(num_tokens: int, seconds: float) -> float:
    return num_tokens / seconds if seconds > 0 else 0.0
