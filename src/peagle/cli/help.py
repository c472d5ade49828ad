"""`--help` with every flag whole, however narrow the terminal: typer's own cuts long ones off."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from peagle.cli.render import console_for

Entry = tuple[str, str]  # a flag, argument or command, and what it is
MOST_LEFT = 0.45  # of the width, for the names


class Command(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_help(self, ctx)


class Group(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_help(self, ctx)


def print_help(command: Any, ctx: Any) -> None:
    """Usage, what the command does, then a panel for each group of flags."""
    console = console_for(sys.stdout)
    console.print(f"\n {command.get_usage(ctx)}\n", style="bold", markup=False, highlight=False)
    if command.help:
        console.print(_indented(" ".join(command.help.split())))
        console.print()
    panels: dict[str, list[Entry]] = {}
    for parameter in command.get_params(ctx):
        entry = parameter.get_help_record(ctx)
        if entry is not None:
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panels.setdefault(parameter.rich_help_panel or usual, []).append(entry)
    if commands := list(_commands(command, ctx)):
        panels["Commands"] = commands
    if ctx.parent is not None and ctx.parent.parent is not None:  # one of a group below `peagle`
        others = [entry for entry in _commands(ctx.parent.command, ctx) if entry[0] != command.name]
        panels["Beside it"] = [(f"{ctx.parent.command_path} {name}", what) for name, what in others]
    for title, entries in ((title, found) for title, found in panels.items() if found):
        console.print(_panel(title, entries, console.width))


def _commands(command: Any, ctx: Any) -> Iterable[Entry]:
    if isinstance(command, TyperGroup):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            if found is not None and not found.hidden:
                yield name, found.get_short_help_str(limit=sys.maxsize)


def _indented(text: str) -> Any:
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(text), (0, 1))


def _panel(title: str, entries: Iterable[Entry], width: int) -> Any:
    """Names beside their meanings. A name never breaks; its type may stand below it."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    entries = list(entries)
    longest_word = max(len(word) for name, _ in entries for word in name.split())
    longest = max(len(name) for name, _ in entries)
    left = max(longest_word, min(longest, int(width * MOST_LEFT)))
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="bold cyan", width=left, overflow="fold")
    table.add_column(overflow="fold")
    for name, meaning in entries:
        table.add_row(Text(name), Text(meaning))
    return Panel(table, title=title, title_align="left", border_style="dim")
