"""One request: its tokens, what it asks for, and how it ended."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from peagle.engine.blocks import BlockTable
from peagle.engine.grammar import Grammar
from peagle.engine.prefix_cache import Key
from peagle.outputs import FinishReason
from peagle.sampling_params import SamplingParams
from peagle.speculation.draft_limit import cache_slack, num_draft_rows
from peagle.speculation.statistics import SpecDecodeStats


class TokenLogprobs(NamedTuple):
    """Raw log-probabilities at one output position: the chosen token first, then the best."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class DraftTree(NamedTuple):
    """The drafts of one step, and what the target took of them. A chain is a tree, too."""

    num_outputs: int  # tokens of the answer before it
    token_ids: list[int]
    parents: list[int]  # 0: the token before the step; n: draft n, counted from 1
    accepted: list[int]  # drafts, counted from 1
    bonus_token_id: int  # the target's own, behind them


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Request:
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    num_speculative_tokens: int  # 0: this request is not speculated for
    stop_token_ids: frozenset[int]
    num_draft_nodes: int | None = None  # of its tree; None: its drafts are a chain
    rows_per_depth: int = 1  # that its drafts take in the drafter's cache
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None  # of structured outputs: where the answer stands in it
    token_ids: list[int] = field(init=False)  # prompt and output
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    table: BlockTable | None = None
    block_keys: list[Key] = field(default_factory=list)  # of the blocks that its tokens fill
    num_cached_tokens: int = 0  # those of the prompt that the prefix cache had
    num_preemptions: int = 0
    # It is decoded without drafts, which do not pay with as many requests as there are; whether it
    # was and has come back.
    rests: bool = False
    has_rested: bool = False
    # Adds the steps that the engine counts by itself.
    take_outcomes: Callable[[SpecDecodeStats], None] | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    draft_trees: list[DraftTree] | None = None  # of its steps, for who asks to see them
    _stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def stats(self) -> SpecDecodeStats:
        if self.take_outcomes is not None:
            self.take_outcomes(self._stats)
        self._stats.num_output_tokens = self.num_outputs
        return self._stats

    @property
    def draft_depth(self) -> int:
        """Draft tokens per step behind each other, at present."""
        return 0 if self.rests else self.num_speculative_tokens

    @property
    def max_drafts(self) -> int:
        """Draft tokens per step in all."""
        nodes = self.num_draft_nodes
        return self.draft_depth if nodes is None or self.rests else nodes

    @property
    def num_draft_rows(self) -> int:
        """Rows of the drafter's cache that its drafts take behind the prefix."""
        return num_draft_rows(self.draft_depth, self.rows_per_depth)

    @property
    def cache_slack(self) -> int:
        """Rows of a tree that may lie behind the end of the answer, in a cache."""
        return cache_slack(self.num_speculative_tokens, self.num_draft_nodes, self.rows_per_depth)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)

    def preempt(self) -> None:
        """Everything but the tokens is computed again."""
        self.num_preemptions += 1
        self.status = Status.WAITING

    def finish(self, reason: FinishReason) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason
