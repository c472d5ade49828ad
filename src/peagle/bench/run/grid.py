"""The cells of a grid, the heads they need, and the order in which they run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from peagle.bench.results.document import Cell, MeasuredHead
from peagle.bench.results.settings import NONE, Setting
from peagle.bench.run.driver import Load
from peagle.bench.run.plan import AUTO, FIXED, NGRAM, BenchPlan
from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.layouts import CONFIG
from peagle.checkpoints.heads.references import resolve_head
from peagle.checkpoints.references import load_config, resolve_model
from peagle.config import (
    AUTO_LIMITS,
    DEFAULT_SPECULATIVE_TOKENS,
    MAX_DRAFT_NODES,
    MAX_SPECULATIVE_TOKENS,
)
from peagle.errors import ConfigError
from peagle.speculation.trees import BEAM, max_tree_depth, num_candidates


class HeadLimits(NamedTuple):
    """What a grid needs to know of a head before it is loaded, or of the n-gram drafter."""

    reference: str | None
    method: str
    advised: int
    deepest: int
    trained: int

    @property
    def name(self) -> str:
        return self.reference or self.method


class GridCell(NamedTuple):
    setting: Setting
    load: Load
    workload: str

    def empty(self) -> Cell:
        return Cell(
            method=self.setting.method,
            head=self.setting.head,
            num_speculative_tokens=self.setting.num_speculative_tokens,
            workload=self.workload,
            concurrency=self.load.concurrency,
            request_rate=self.load.request_rate,
            num_draft_nodes=self.setting.num_draft_nodes,
            is_auto=self.setting.is_auto,
        )


class PlannedRun(NamedTuple):
    """One run of one cell, not made yet."""

    cell: GridCell
    repeat: int


def grid_settings(plan: BenchPlan, heads: Sequence[HeadLimits]) -> tuple[list[Setting], list[str]]:
    """Every method at every K, method none first; and notes on depths that a head cannot reach."""
    if plan.is_endpoint:
        method = plan.spec_method[0] if plan.spec_method else "endpoint"
        return [Setting(method, plan.spec_tokens[0] if plan.spec_tokens else 0)], []
    found, notes = [Setting(NONE)], list[str]()
    wanted = set(plan.spec_method) - {NONE, NGRAM}
    usual = DEFAULT_SPECULATIVE_TOKENS
    ngram = HeadLimits(None, NGRAM, usual, MAX_SPECULATIVE_TOKENS, usual)
    for head in [*([ngram] if NGRAM in plan.spec_method else []), *heads]:
        if wanted and head.method not in {*wanted, NGRAM}:
            raise ConfigError(
                f"{head.reference} is a head for {head.method}, not {' or '.join(sorted(wanted))}",
                hint=f"drop it, or add {head.method} to --spec-method",
            )
        if AUTO in plan.speculation:
            found.append(_auto_setting(head))
        if FIXED not in (plan.speculation or [FIXED]):
            continue
        chains = _settings_of(head, plan.spec_tokens or [head.advised], notes)
        found += chains
        if plan.spec_nodes:
            found += _trees_of(head, chains, plan.spec_nodes, notes)
    if plan.spec_nodes and not any(setting.num_draft_nodes for setting in found):
        raise ConfigError(
            "--spec-nodes was given, but no setting can draft such trees",
            hint="give a head or --spec-method ngram, and fewer nodes or more --spec-tokens",
        )
    missing = wanted - {head.method for head in heads}
    if missing:
        raise ConfigError(
            f"method {min(missing)} needs a head", hint="give it with --spec-model HEAD"
        )
    return list(dict.fromkeys(found)), notes


def _settings_of(head: HeadLimits, depths: Sequence[int], notes: list[str]) -> list[Setting]:
    """A setting for each depth that the head can reach; `notes` gets a line on the others."""
    within = [k for k in depths if k <= head.deepest]
    most = f"{head.name} drafts at most {head.deepest} tokens"
    if not within:
        raise ConfigError(most, hint="lower --spec-tokens")
    if len(within) < len(depths):
        notes.append(f"{most}; deeper K is left out")
    return [Setting(head.method, k, head.reference) for k in within]


def _auto_setting(head: HeadLimits) -> Setting:
    """As a user has it who gives neither K nor N."""
    depth = min(head.trained, *(depth for depth, _ in AUTO_LIMITS.values()))
    return Setting(head.method, depth, head.reference, is_auto=True)


def _trees_of(
    head: HeadLimits, chains: Sequence[Setting], nodes: Sequence[int], notes: list[str]
) -> list[Setting]:
    """Trees as deep as each chain; `notes` gets a line on those that cannot be so deep or large."""
    found, deepest = [], max_tree_depth(head.method, head.deepest)
    if any(chain.num_speculative_tokens > deepest for chain in chains):
        notes.append(f"trees of {head.name} are at most {deepest} deep; deeper ones are left out")
    for chain in chains:
        if chain.num_speculative_tokens > deepest:
            continue
        most = min(num_candidates(chain.num_speculative_tokens, BEAM), MAX_DRAFT_NODES)
        found += [replace(chain, num_draft_nodes=n) for n in nodes if n <= most]
        if max(nodes) > most:
            k = chain.num_speculative_tokens
            notes.append(f"trees of depth {k} have at most {most} nodes; larger ones are left out")
    return found


def make_cells(
    plan: BenchPlan, settings: Sequence[Setting], workloads: Sequence[str]
) -> list[GridCell]:
    """Cells are grouped by drafter, so that few engines need to be alive at once."""
    loads = [Load(concurrency=c) for c in sorted(set(plan.concurrencies))]
    loads += [Load(request_rate=rate) for rate in sorted(set(plan.request_rate))]
    return [
        GridCell(setting, load, workload)
        for setting in settings
        for load in loads
        for workload in workloads
    ]


def run_order(cells: Sequence[GridCell], repeats: int, *, interleave: bool) -> Iterator[PlannedRun]:
    """Interleaved: all cells once, then all again. Every other round goes backwards, so that a
    machine that slows down steadily hits early and late cells alike."""
    if not interleave:
        yield from (PlannedRun(cell, repeat) for cell in cells for repeat in range(repeats))
        return
    for repeat in range(repeats):
        ordered = cells if repeat % 2 == 0 else list(reversed(cells))
        yield from (PlannedRun(cell, repeat) for cell in ordered)


def head_limits(references: Sequence[str], model: str) -> list[HeadLimits]:
    """Reads each head's config, and refuses one for another model before anything is loaded."""
    if not references:
        return []
    target = load_config(resolve_model(model)).get_text_config()
    found = []
    for reference in references:
        config = read_head_config(resolve_head(reference))
        config.check_fits(target)
        deepest = trained = config.max_speculative_tokens
        if config.method == "eagle3":
            deepest = MAX_SPECULATIVE_TOKENS  # it drafts one by one, as far as one likes
        advised = config.num_speculative_tokens
        found.append(HeadLimits(reference, config.method, advised, deepest, trained))
    return found


def head_info(limits: HeadLimits) -> MeasuredHead:
    """Holds a digest of its files: a head that was trained further is another head."""
    assert limits.reference is not None
    folder, digest = resolve_head(limits.reference), hashlib.sha256()
    for path in (folder / CONFIG, *sorted(folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return MeasuredHead(limits.reference, limits.method, digest.hexdigest())
