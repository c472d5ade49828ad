"""What a verb prints: data to stdout, the rest to stderr. rich is loaded when a table is."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import IO, TYPE_CHECKING, Any, Literal

from peagle.bench.results import figures
from peagle.errors import PeagleError
from peagle.log import is_quiet
from peagle.speculation.statistics import SpecDecodeStats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 120  # of tables where there is no terminal to ask
PADDING = 3  # of a column: a line and a space on both sides


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
    if text.startswith("known: "):
        return text  # keys of a file or of a JSON option
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
    """The last line of stdout; escaped where its encoding could not express every text."""
    ascii_only = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    write(json.dumps(document, ensure_ascii=ascii_only) + "\n")


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    names: int = 1,
    file: IO[str] | None = None,
) -> None:
    """As wide as the terminal at most, with every cell whole: lines break between words, and what
    does not fit beside each other stands in a further table. The first `names` columns say what a
    row is and stand in each of them."""
    console = console_for(file or sys.stdout)
    table = [_Column(*cells) for cells in zip(columns, *rows, strict=True)]
    for number, part in enumerate(_parts(table, names, console.width)):
        widths = _widths(part, names, console.width)
        console.print(_rich_table(title if number == 0 else None, part, widths))


def console_for(file: IO[str]) -> Console:
    from rich.console import Console

    known = file.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(file=file, width=None if known else PIPE_WIDTH)


class _Column:
    def __init__(self, title: str, *values: str) -> None:
        self.title, self.values = title, values
        words = [word for text in (title, *values) for word in text.split() or [""]]
        self.least = max(map(len, words))
        self.most = max(map(len, (title, *values)))

    @property
    def justify(self) -> Literal["left", "right"]:
        numbers = all(v in ("", "-") or v.lstrip("+-$")[:1].isdigit() for v in self.values)
        return "right" if numbers else "left"


def _parts(table: Sequence[_Column], names: int, width: int) -> list[list[_Column]]:
    """The columns of each table that is printed."""
    key, parts = list(table[:names]), [list(table[:names])]
    for column in table[names:]:
        if len(parts[-1]) > names and _needed([*parts[-1], column]) > width:
            parts.append(list(key))
        parts[-1].append(column)
    return parts


def _needed(columns: Sequence[_Column]) -> int:
    """Columns of the screen, if each is as wide as its longest word."""
    return 1 + sum(column.least + PADDING for column in columns)


def _widths(columns: Sequence[_Column], names: int, width: int) -> list[int]:
    """Each at least its longest word; what is left goes to names, then to the narrowest that want
    more. Where words are too wide for the screen, such as paths, the widest columns give way."""
    spare = width - _needed(columns)
    widths = [column.least for column in columns]
    for _ in range(-spare):
        widths[max(range(len(widths)), key=widths.__getitem__)] -= 1
    for _ in range(spare):
        wanting = [n for n, column in enumerate(columns) if widths[n] < column.most]
        if not wanting:
            break
        widths[min(wanting, key=lambda n: (n >= names, widths[n]))] += 1
    return widths


def _rich_table(title: str | None, columns: Sequence[_Column], widths: Sequence[int]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for column, own in zip(columns, widths, strict=True):
        table.add_column(_folded(column.title, own), justify=column.justify, width=own)
    for row in zip(*(column.values for column in columns), strict=True):
        table.add_row(*map(_folded, row, widths))
    return table


def _folded(text: str, width: int) -> str:
    """Words that are wider go on in the next line, after a hyphen where there is one."""
    words = [word if len(word) <= width else "\n".join(textwrap.wrap(word, width))
             for word in text.split(" ")]  # fmt: skip
    return " ".join(words)


def stats_line(num_tokens: int, seconds: float, stats: SpecDecodeStats) -> str:
    """`128 tokens in 2.0 s, 64.0 tokens/s; mean acceptance length 2.31, per position 0.7 0.4`."""
    speed = figures.quantity(rate(num_tokens, seconds))
    line = f"{figures.counted(num_tokens, 'token')} in {seconds:.1f} s, {speed} tokens/s"
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
