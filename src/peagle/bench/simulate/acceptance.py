"""Acceptance profiles: a drafter's mean acceptance length by K, and where it can be read from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from peagle.bench.results.document import RESULTS, CellRun, Results, from_json
from peagle.bench.results.settings import usable_runs
from peagle.bench.simulate.step_costs import between
from peagle.errors import ConfigError, DataError

METHODS_IN_NAMES = ("p-eagle", "eagle3", "ngram")


@dataclass(frozen=True)
class Profile:
    """Tokens that a step yields at K, its own token included; 1 without drafts. Measured at each
    K on its own where that is known: with a smaller K steps start at other, easier tokens."""

    lengths: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ConfigError("the acceptance profile is empty", hint="give 0.73,0.51,0.35 ...")
        for k, length in self.lengths.items():
            if k < 1 or not 1 <= length <= k + 1:
                raise ConfigError(f"an acceptance length of {length:g} at K = {k} is impossible")

    def length(self, k: int) -> float:
        """Between two measured K the straight line is taken; beyond the deepest it is an error."""
        if not 1 <= k <= max(self.lengths):
            raise ConfigError(
                f"acceptance at K = {k} is not known", hint=f"use K from 1 to {max(self.lengths)}"
            )
        return between({0: 1.0, **self.lengths}, k)


def profile_of_rates(rates: Sequence[float]) -> Profile:
    """`rates` are per-position acceptance: shares of all steps, which never rise."""
    if any(not 0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"per-position acceptance {list(rates)} is not within 0 to 1")
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
        raise DataError(f"cannot read acceptance from {file}: {error}") from None
    found = _from_document(document, str(file))
    if not found:
        raise DataError(f"{file} holds no acceptance figures")
    return found


def profiles_of(results: Results) -> dict[str, Profile]:
    """One profile per method, over all workloads and loads; of chains alone."""
    runs: dict[str, dict[int, list[CellRun]]] = {}
    for cell in results.chains:
        for run in usable_runs(cell):
            if run.stats.get("num_drafts"):
                by_k = runs.setdefault(cell.method, {})
                by_k.setdefault(cell.num_speculative_tokens, []).append(run)
    return {
        method: Profile({k: tokens_per_step(group) for k, group in by_k.items()})
        for method, by_k in runs.items()
    }


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
            heads = document["heads"].items()
            return {_method(name): _by_k(head["held_out"]["all"]) for name, head in heads}
        if "acceptance" in document:
            way = next(iter(document["acceptance"].values()))
            return {str(document["method"]): _by_k(way["all"])}
    except (AttributeError, KeyError, TypeError, StopIteration) as error:
        raise DataError(f"{where} holds acceptance in an unknown form: {error!r}") from None
    return {}


def _by_k(group: Mapping[str, Any]) -> Profile:
    return Profile(dict(enumerate(map(float, group["acceptance_length"]), start=1)))


def _method(head_name: str) -> str:
    return next((m for m in METHODS_IN_NAMES if head_name.endswith(m)), head_name)
