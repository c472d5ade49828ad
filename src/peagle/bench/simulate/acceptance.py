"""Acceptance profiles: a drafter's mean acceptance length by K and N, and where it is read from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from peagle.bench.results.document import RESULTS, Cell, CellRun, Results, from_json
from peagle.bench.results.settings import usable_runs
from peagle.bench.simulate.step_costs import between
from peagle.errors import ConfigError, DataError

METHODS_IN_NAMES = ("p-eagle", "eagle3", "ngram")
FILE_HINT = "give an --out of peagle bench, or a file of peagle evaluate --json"


@dataclass(frozen=True)
class Profile:
    """Tokens that a step yields, its own token included; 1 without drafts. Measured at each K and
    N on its own where that is known: with fewer drafts steps start at other, easier tokens."""

    lengths: Mapping[int, float]  # chains, by K
    trees: Mapping[int, Mapping[int, float]] = field(default_factory=dict)  # by depth K, by nodes N

    def __post_init__(self) -> None:
        if not self.lengths and not self.trees:
            raise ConfigError("the acceptance profile is empty", hint="give 0.73,0.51,0.35 ...")
        lines = [(k, k, length) for k, length in self.lengths.items()]
        lines += [(k, n, length) for k, line in self.trees.items() for n, length in line.items()]
        for k, nodes, length in lines:
            if min(k, nodes) < 1 or not 1 <= length <= min(k, nodes) + 1:
                where = f"K = {k}" if nodes == k else f"K = {k}, N = {nodes}"
                raise ConfigError(f"an acceptance length of {length:g} at {where} is impossible")

    def length(self, k: int, nodes: int | None = None) -> float:
        """Of a chain, or of a tree of so many nodes. Between two measured sizes the straight line
        is taken; beyond the largest it is an error."""
        line = self.lengths if nodes is None else self.trees.get(k, {})
        size, where = (k, f"K = {k}") if nodes is None else (nodes, f"K = {k}, N = {nodes}")
        if not line or not 1 <= size <= max(line):
            raise ConfigError(f"acceptance at {where} is not known", hint=self._known)
        return between({0: 1.0, **line}, size)

    @property
    def _known(self) -> str:
        known = [f"K from 1 to {max(self.lengths)}"] if self.lengths else []
        known += [f"K = {k} with N from 1 to {max(line)}" for k, line in self.trees.items()]
        return f"use {', or '.join(known)}"


def profile_of_rates(rates: Sequence[float]) -> Profile:
    """`rates` are per-position acceptance: shares of all steps, which never rise."""
    if any(not 0 <= rate <= 1 for rate in rates):
        raise ConfigError(
            f"per-position acceptance {list(rates)} is out of range", hint="use shares in [0, 1]"
        )
    if any(later > earlier + 1e-9 for earlier, later in pairwise(rates)):
        raise ConfigError(
            f"per-position acceptance {list(rates)} rises",
            hint="give shares of all steps, not of those whose drafts before were accepted",
        )
    return Profile({k: 1.0 + math.fsum(rates[:k]) for k in range(1, len(rates) + 1)})


def read_profiles(text: str, methods: Sequence[str]) -> dict[str, Profile]:
    """A list of rates (for each of `methods`), bench results, `peagle evaluate --json`, or
    benchmarks/results/heads_h200.json. A file names its methods itself."""
    path = Path(text)
    if not path.exists():
        profile = profile_of_rates(_rates(text))
        return dict.fromkeys(methods, profile)
    file = path / RESULTS if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read acceptance from {file}: {reason}", hint=FILE_HINT) from None
    found = _from_document(document, str(file))
    if not found:
        raise DataError(f"{file} holds no acceptance figures", hint=FILE_HINT)
    return found


def profiles_of(results: Results) -> dict[str, Profile]:
    """One profile per method, over all workloads and loads."""
    methods = dict.fromkeys(cell.method for cell in results.fixed)
    own = {m: [cell for cell in results.fixed if cell.method == m] for m in methods}
    return {m: profile for m, cells in own.items() if (profile := profile_of_cells(cells))}


def profile_of_cells(cells: Iterable[Cell]) -> Profile | None:
    """Acceptance does not depend on the load, so those of all loads are taken. None without any."""
    runs: dict[tuple[int, int | None], list[CellRun]] = {}
    for cell in cells:
        drafting = [run for run in usable_runs(cell) if run.stats.get("num_drafts")]
        if drafting:
            size = cell.num_speculative_tokens, cell.num_draft_nodes
            runs.setdefault(size, []).extend(drafting)
    lengths, trees = dict[int, float](), dict[int, dict[int, float]]()
    for (k, nodes), group in runs.items():
        if nodes is None:
            lengths[k] = tokens_per_step(group)
        else:
            trees.setdefault(k, {})[nodes] = tokens_per_step(group)
    return Profile(lengths, trees) if runs else None


def tokens_per_step(runs: Iterable[CellRun]) -> float:
    """The mean over all steps. An n-gram drafter often has nothing to propose, and such a step
    yields one token; the mean acceptance length leaves those steps out, so this is at most that."""
    stats = [run.stats for run in runs]
    steps = sum(s.get("num_steps") or s["num_drafts"] for s in stats)
    return 1.0 + float(sum(s["num_accepted_tokens"] for s in stats) / steps)


def _rates(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{text!r} is neither a file nor a list of rates", hint="give 0.73,0.51,0.35 ..."
        ) from None


def _from_document(document: Any, where: str) -> dict[str, Profile]:
    if not isinstance(document, dict):
        return {}
    if "manifest" in document:
        return profiles_of(from_json(document, where))
    try:
        if "heads" in document:
            held_out = {name: head["held_out"] for name, head in document["heads"].items()}
            return {_method(name): Profile(_by_size(h["all"])) for name, h in held_out.items()}
        if "acceptance" in document:
            way = next(iter(document["acceptance"].values()))
            chains, trees = _by_size(way["all"]), dict[int, Mapping[int, float]]()
            if "trees" in document:
                trees[document["num_speculative_tokens"]] = _by_size(document["trees"]["all"])
            return {str(document["method"]): Profile(chains, trees)}
    except (AttributeError, KeyError, TypeError, StopIteration) as error:
        raise DataError(f"{where} holds acceptance in an unknown form: {error!r}") from None
    return {}


def _by_size(group: Mapping[str, Any]) -> dict[int, float]:
    return dict(enumerate(map(float, group["acceptance_length"]), start=1))


def _method(head_name: str) -> str:
    return next((m for m in METHODS_IN_NAMES if head_name.endswith(m)), head_name)
