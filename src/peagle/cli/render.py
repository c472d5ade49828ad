"""What a verb prints: data to stdout, the rest to stderr. rich is loaded when a table is."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

from peagle.bench.results import figures
from peagle.speculation.statistics import SpecDecodeStats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 120  # of tables where there is no terminal to ask
PADDING = 3  # of a column: a line and a space on both sides


def print_error(message: str, hint: str | None = None) -> None:
    """One line, whatever the message holds, and the hint on its own."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    if hint:
        sys.stderr.write(f"hint: {' '.join(hint.split())}\n")
    sys.stderr.flush()


def note(text: str) -> None:
    """Progress and remarks."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def counted(label: str) -> Callable[[int, int], None]:
    """Progress by counts: a note for each tenth."""

    def tell(done: int, total: int) -> None:
        if done and (done == total or done % max(total // 10, 1) == 0):
            note(f"{label}: {done} of {total}")

    return tell


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
