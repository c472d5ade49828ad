"""A grid's cells by what is compared (method and K) and by where (workload and load)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.bench.results.document import Cell, CellRun, method_name

NONE = "none"
METHOD_ORDER = (NONE, "ngram", "eagle3", "p-eagle")
Names = Mapping[tuple[str, str | None], str]  # Setting.series -> what a reader calls it


@dataclass(frozen=True)
class Setting:
    """What a server is started with."""

    method: str
    num_speculative_tokens: int = 0  # 0 for none; at most, where the engine chooses
    head: str | None = None
    num_draft_nodes: int | None = None  # of trees; None: drafts are chains
    is_auto: bool = False  # the engine chooses how many drafts a step verifies

    @property
    def name(self) -> str:
        """`p-eagle`, of trees `p-eagle N=31`, or `p-eagle auto`."""
        return method_name(self.method, self.num_draft_nodes, is_auto=self.is_auto)

    @property
    def series(self) -> tuple[str, str | None]:
        """What all its K have in common."""
        return self.name, self.head

    @property
    def sort_key(self) -> tuple[int, str, str, bool, int, int]:
        known = self.method in METHOD_ORDER
        place = METHOD_ORDER.index(self.method) if known else len(METHOD_ORDER)
        nodes = self.num_draft_nodes or 0
        depth = self.num_speculative_tokens
        return place, self.method, self.head or "", self.is_auto, nodes, depth


@dataclass(frozen=True)
class Place:
    """Where a setting was measured."""

    workload: str
    load: str  # Cell.load: `4` requests at once, or `2.5/s`

    @property
    def is_open_loop(self) -> bool:
        """Requests arrive at a rate: they, not the server, set the tokens per second, and a gain
        shows in the latencies alone."""
        return self.load.endswith("/s")

    @property
    def sort_key(self) -> tuple[str, bool, float]:
        return self.workload, *load_key(self.load)


def series_names(cells: Iterable[Cell]) -> dict[tuple[str, str | None], str]:
    """The method alone where it has one head only, `p-eagle (my-head)` otherwise."""
    found = sorted(map(setting_of, cells), key=lambda setting: setting.sort_key)
    heads: dict[str, list[str | None]] = {}
    for method, head in dict.fromkeys(setting.series for setting in found):
        heads.setdefault(method, []).append(head)
    return {
        (method, head): method if head is None or len(own) == 1 else f"{method} ({name})"
        for method, own in heads.items()
        for head, name in zip(own, distinct_names([head or "" for head in own]), strict=True)
    }


def distinct_names(paths: Sequence[str]) -> list[str]:
    """The last part of each, or as many parts as it takes: `a/final` and `b/final`."""
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts), default=0)):
        names = ["/".join(own[-count:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def short_name(setting: Setting, names: Names) -> str:
    """`p-eagle K=5`; `p-eagle auto`; `none`."""
    name = names.get(setting.series, setting.name)
    has_depth = setting.method != NONE and not setting.is_auto
    return f"{name} K={setting.num_speculative_tokens}" if has_depth else name


def full_name(setting: Setting) -> str:
    """The short name with the head, for a reader who does not see the other settings."""
    head = f" ({Path(setting.head).name})" if setting.head else ""
    return short_name(setting, {setting.series: f"{setting.name}{head}"})


def trees_in_words(cells: Iterable[Cell]) -> str:
    """What `p-eagle N=31 K=7` means; empty where no trees were measured."""
    if all(cell.num_draft_nodes is None for cell in cells):
        return ""
    return "N is the number of nodes in a tree of drafts, K its depth; without N drafts are chains."


def load_key(load: str) -> tuple[bool, float]:
    """Orders loads: by concurrency, then by request rate."""
    return load.endswith("/s"), float(load.removesuffix("/s"))


def setting_of(cell: Cell) -> Setting:
    depth, nodes = cell.num_speculative_tokens, cell.num_draft_nodes
    return Setting(cell.method, depth, cell.head, nodes, cell.is_auto)


def place_of(cell: Cell) -> Place:
    return Place(cell.workload, cell.load)


def usable_runs(cell: Cell) -> list[CellRun]:
    return list(cell.usable_repeats().values())


def by_place(cells: Iterable[Cell]) -> dict[Place, dict[Setting, Cell]]:
    """Cells with at least one usable repeat, in a reader's order."""
    table: dict[Place, dict[Setting, Cell]] = {}
    for cell in sorted(cells, key=lambda c: (place_of(c).sort_key, setting_of(c).sort_key)):
        if usable_runs(cell):
            table.setdefault(place_of(cell), {})[setting_of(cell)] = cell
    return table
