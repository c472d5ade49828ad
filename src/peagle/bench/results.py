"""What `peagle bench` leaves in OUT/results.json. Imports no torch.

Everything is plain JSON: numbers, texts, lists, objects; None where a figure is not known (an
endpoint that shows no token ids, a platform without a GPU). Times are seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from peagle.bench.cells import Cell

FORMAT_VERSION = 1


@dataclass(frozen=True)
class WorkloadInfo:
    name: str
    sha256: str  # over its prompts, in their order
    num_prompts: int
    categories: dict[str, int] = field(default_factory=dict)
    num_bad: int = 0  # rows that were skipped
    raw: bool = False  # no chat template


@dataclass(frozen=True)
class HeadInfo:
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
    heads: list[HeadInfo] = field(default_factory=list)
    workloads: list[WorkloadInfo] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # the rest: ignore_eos, warm-up ...


@dataclass(frozen=True)
class Difference:
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
    differences: list[Difference] = field(default_factory=list)  # some of each run's
    # The same figures without and with speculation. None in results of before they were kept.
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
class Results:
    manifest: Manifest
    cells: list[Cell] = field(default_factory=list)
    lossless: Lossless | None = None  # None: nothing to compare (sampled, or no method none)
    samples: list[Sample] = field(default_factory=list)
    partial: bool = False  # the grid is not finished
    version: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """The document, each cell with its summary for readers that do no sums."""
        record = asdict(self)
        for cell, entry in zip(self.cells, record["cells"], strict=True):
            summary = cell.summary()
            entry["summary"] = asdict(summary) if summary else None
        return record
