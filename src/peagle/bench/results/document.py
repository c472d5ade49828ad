"""The document that `peagle bench` leaves in OUT/results.json, written and read. Imports no torch.

Every value is JSON: numbers, texts, lists, objects; None where a figure is not known (an endpoint
that shows no token ids, a platform without a GPU). Times are seconds.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from peagle.bench.results.intervals import Interval, median_interval
from peagle.config import expected_value
from peagle.errors import DataError
from peagle.files import write_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FORMAT_VERSION = 1
RESULTS = "results.json"
BENCH_HINT = "give an --out of peagle bench"
BUSY = 0.1  # share of the CPUs that others took, above which a speed is worth little

_T = TypeVar("_T")


@dataclass(frozen=True)
class Quantiles:
    p50: float
    p95: float
    p99: float
    mean: float


@dataclass(frozen=True)
class Latencies:
    """`ttft`: until the first token; `tpot`: per token after the first, one value a request;
    `itl`: between two chunks of tokens, one value a pair of chunks; `e2el`: the whole answer.
    With a request rate all count from the scheduled arrival. None: nothing to take it from."""

    ttft: Quantiles | None = None
    tpot: Quantiles | None = None
    itl: Quantiles | None = None
    e2el: Quantiles | None = None


@dataclass(frozen=True)
class Category:
    """The share of a run that one category of prompts had."""

    num_requests: int
    num_output_tokens: int
    acceptance_length: float | None = None  # None: nothing was drafted, or it is not known


@dataclass(frozen=True)
class CellRun:
    """One repeat of one cell. `stats` is SpecDecodeStats.as_dict(): counters, the derived
    acceptance figures, and draft_time, verify_time and other_time; empty where the backend shows
    none. `partial`: it was cut short or a request failed; `errors` says why."""

    otps: float  # output tokens per second over `wall_s`
    latencies: Latencies
    num_requests: int  # those that were answered
    num_output_tokens: int
    wall_s: float  # from the first start (or scheduled arrival) to the last token
    # The same until the last conversation began, while all streams are busy: the whole run ends in
    # a tail in which fewer run. None in an open loop, and with no more prompts than streams.
    steady_otps: float | None = None
    num_repeated: int = 0  # conversations that asked a prompt of this run again
    num_compiled: int = 0  # what the backend had to make during it, such as CUDA graphs
    stats: dict[str, Any] = field(default_factory=dict)
    looping_share: float | None = None  # of the answers
    acceptance_without_looping: float | None = None  # mean acceptance length
    peak_memory_bytes: int | None = None
    gpu_utilization: float | None = None  # 0 to 1
    other_cpu_share: float | None = None  # of the CPUs' time, taken by other processes or machines
    categories: dict[str, Category] = field(default_factory=dict)
    partial: bool = False
    errors: list[str] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verification step; None if nothing was drafted or it is not known."""
        if not self.stats.get("num_drafts"):
            return None
        return float(self.stats["mean_acceptance_length"])


@dataclass(frozen=True)
class Summary:
    """Of a cell's whole repeats; partial ones count only where there is no whole one."""

    otps: Interval
    steady_otps: float | None
    num_repeats: int
    acceptance_length: float | None
    acceptance_without_looping: float | None
    partial: bool
    busy: bool  # others used the machine in most repeats


def is_busy(other_cpu_share: float | None) -> bool:
    return other_cpu_share is not None and other_cpu_share > BUSY


def method_name(method: str, num_draft_nodes: int | None, *, is_auto: bool) -> str:
    if is_auto:
        return f"{method} auto"
    return method if num_draft_nodes is None else f"{method} N={num_draft_nodes}"


@dataclass(frozen=True)
class Cell:
    """One point of the grid. Exactly one of `concurrency` and `request_rate` is set."""

    method: str  # none, ngram, eagle3, p-eagle; for an endpoint: what the user calls it
    num_speculative_tokens: int  # 0 for none
    workload: str
    concurrency: int | None = None
    request_rate: float | None = None  # requests per second
    head: str | None = None  # the head's reference, as in Manifest.heads
    repeats: list[CellRun] = field(default_factory=list)
    num_draft_nodes: int | None = None  # of trees; None: drafts are chains
    is_auto: bool = False  # the engine chooses how many drafts a step verifies

    @property
    def label(self) -> str:
        """`p-eagle`, of trees `p-eagle N=31`, or `p-eagle auto`; the same name for every K."""
        name = method_name(self.method, self.num_draft_nodes, is_auto=self.is_auto)
        return name if self.head is None else f"{name} ({Path(self.head).name})"

    @property
    def load(self) -> str:
        return f"{self.concurrency}" if self.concurrency else f"{self.request_rate:g}/s"

    def usable_repeats(self) -> dict[int, CellRun]:
        """Number -> repeat: the whole ones in which nothing was compiled; where there are none, the
        whole ones, and then the partial ones. Repeats without a token are left out."""
        runs = {number: run for number, run in enumerate(self.repeats) if run.otps > 0}
        whole = {number: run for number, run in runs.items() if not run.partial}
        steady = {number: run for number, run in whole.items() if not run.num_compiled}
        return steady or whole or runs

    def summary(self) -> Summary | None:
        """None before the first repeat."""
        runs = list(self.usable_repeats().values()) or self.repeats
        if not runs:
            return None
        return Summary(
            otps=median_interval([run.otps for run in runs]),
            steady_otps=_mean([run.steady_otps for run in runs]),
            num_repeats=len(runs),
            acceptance_length=_mean([run.acceptance_length for run in runs]),
            acceptance_without_looping=_mean([r.acceptance_without_looping for r in runs]),
            partial=all(run.partial for run in runs),
            busy=sum(is_busy(run.other_cpu_share) for run in runs) > len(runs) / 2,
        )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class WorkloadInfo:
    name: str
    sha256: str  # over its prompts, in their order
    num_prompts: int
    categories: dict[str, int] = field(default_factory=dict)
    num_bad: int = 0  # rows that were skipped
    raw: bool = False  # no chat template


@dataclass(frozen=True)
class MeasuredHead:
    reference: str  # as the user gave it
    method: str
    sha256: str | None = None  # of its config and weights


@dataclass(frozen=True)
class Manifest:
    provenance: dict[str, Any]
    model: str
    backend: str  # embedded, vllm or an address
    dtype: str
    device: str
    seed: int
    max_tokens: int
    temperature: float
    num_repeats: int
    heads: list[MeasuredHead] = field(default_factory=list)
    workloads: list[WorkloadInfo] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # the rest: ignore_eos, warm-up ...


@dataclass(frozen=True)
class AnswerDifference:
    """Where an answer first left that of method none. `gap` is the log-probability of
    `expected` minus that of `got` after the common prefix, by the plain target: near 0 is a tie
    that rounding broke. A token is None where the answer had ended."""

    method: str
    num_speculative_tokens: int
    workload: str
    load: str  # Cell.load
    repeat: int
    prompt: str  # its id
    turn: int  # 0 is the first
    position: int  # 0 is the answer's first token
    expected: int | None
    got: int | None
    gap: float | None = None
    expected_text: str = ""
    got_text: str = ""


@dataclass(frozen=True)
class Agreement:
    """How many answers of several runs are the reference's. Gaps without sign, of those
    differences whose gap was computed."""

    compared: int
    different: int
    num_gaps: int = 0
    median_gap: float | None = None
    largest_gap: float | None = None


@dataclass(frozen=True)
class Lossless:
    """Greedy answers of all cells against method none's of the same workload, at the smallest
    load under which it was asked them, first repeat. None itself is compared under its other
    loads: a batch of another size rounds differently, without any speculation."""

    compared: int  # answers
    different: int
    not_comparable: int = 0  # later turns of a conversation that differed before
    differences: list[AnswerDifference] = field(default_factory=list)  # some of each run's
    # The same figures without and with speculation. None: the file does not tell them apart.
    plain: Agreement | None = None
    speculative: Agreement | None = None


@dataclass(frozen=True)
class SampleToken:
    text: str
    drafted: bool  # an accepted draft; False: the target's own


@dataclass(frozen=True)
class Sample:
    """One answer of one method, for a look side by side."""

    workload: str
    prompt: str  # its id
    question: str  # the prompt's text; empty for prompts that are not ours to publish
    method: str
    num_speculative_tokens: int
    tokens: list[SampleToken] = field(default_factory=list)


@dataclass(frozen=True)
class TreeNode:
    text: str
    parent: int  # the node before it, counted from 1; 0: the newest token
    accepted: bool


@dataclass(frozen=True)
class TreeSample:
    """The tree of drafts that one step of an answer verified, and what the target took of it."""

    workload: str
    prompt: str  # its id
    method: str  # Cell.label
    num_speculative_tokens: int
    before: str  # the end of the answer so far
    nodes: list[TreeNode]  # the most probable path first
    bonus: str  # the target's own token behind the accepted ones; empty: the answer had ended


@dataclass(frozen=True)
class Results:
    manifest: Manifest
    cells: list[Cell] = field(default_factory=list)
    lossless: Lossless | None = None  # None: nothing to compare (sampled, or no method none)
    samples: list[Sample] = field(default_factory=list)
    partial: bool = False  # the grid is not finished
    trees: list[TreeSample] = field(default_factory=list)  # one of each method that drafts trees
    version: int = FORMAT_VERSION

    @property
    def fixed(self) -> list[Cell]:
        """The cells whose steps verify the same number of drafts each."""
        return [cell for cell in self.cells if not cell.is_auto]

    def to_json(self) -> dict[str, Any]:
        """The document, each cell with its summary."""
        record = asdict(self)
        for cell, entry in zip(self.cells, record["cells"], strict=True):
            summary = cell.summary()
            entry["summary"] = asdict(summary) if summary else None
        return record


def save_results(results: Results, folder: Path) -> Path:
    path = folder / RESULTS
    write_json(path, results.to_json())
    return path


def load_results(path: Path) -> Results:
    """Reads a results file, or the folder that holds one."""
    file = path / RESULTS if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"no results at {path}: {error.strerror}", hint=BENCH_HINT) from None
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON: {error}", hint=BENCH_HINT) from None
    return from_json(document, str(file))


def from_json(document: Any, where: str) -> Results:
    if not isinstance(document, dict) or "manifest" not in document:
        raise DataError(f"{where} is not a result of peagle bench", hint=BENCH_HINT)
    if document.get("version") != FORMAT_VERSION:
        raise DataError(
            f"{where} has version {document.get('version')}, this peagle reads {FORMAT_VERSION}",
            hint="measure again, or use the peagle that wrote it",
        )
    results = decode(Results, _without_summaries(document), where)
    for number, cell in enumerate(results.cells):
        if (cell.concurrency is None) == (cell.request_rate is None):
            raise DataError(f"{where}: cells[{number}] needs concurrency or request_rate, not both")
    return results


def _without_summaries(document: dict[str, Any]) -> dict[str, Any]:
    """They are made from the repeats, never read."""
    cells = document.get("cells")
    if not isinstance(cells, list):
        return document
    bare = [
        {key: value for key, value in cell.items() if key != "summary"}
        if isinstance(cell, dict)
        else cell
        for cell in cells
    ]
    return document | {"cells": bare}


def decode(cls: type[_T], document: Any, where: str) -> _T:
    """A dataclass with those inside it. A wrong type, a missing or an unknown key is an error that
    says where it stands."""
    from pydantic import ValidationError  # not needed for `peagle --help`

    try:
        # As JSON: from Python objects, strict mode would take instances of the dataclasses only.
        adapter = _adapter(cast("Any", cls))
        return cast("_T", adapter.validate_json(json.dumps(document), strict=True, extra="forbid"))
    except ValidationError as error:
        raise _misfit(error.errors()[0], cls, where) from None


@functools.cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _misfit(error: Mapping[str, Any], cls: Any, where: str) -> DataError:
    *parents, last = error["loc"] or ("the document",)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    place = f"{where}: {path.removeprefix('.') or last}"
    if error["type"] == "missing":
        return DataError(f"{place} is missing")
    if error["type"] == "unexpected_keyword_argument":
        known = [f.name for f in dataclasses.fields(cls)] if not parents else []
        nearest = difflib.get_close_matches(str(last), known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "drop it, or update peagle"
        return DataError(f"{place} is an unknown key", hint=hint)
    return DataError(f"{place} is {reprlib.repr(error['input'])}, not {expected_value(error)}")
