"""The steps that an engine takes through a text which the target wrote.

Prefill yields each answer's first token. Then a step at the newest token p, anchor p - 1, keeps
the drafts that are right and adds one token of the target's own. What the text does not tell is
how many drafts the engine asked for: `Limits` are those that its scheduler obeys.

Shapes: n tokens of one document, K depths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from peagle.speculation.draft_limit import draft_limit
from peagle.speculation.statistics import SpecDecodeStats

FAR = 1 << 40  # tokens: no limit


class Limits(NamedTuple):
    """Drafts that could not become output are not asked for. None: no such limit."""

    max_tokens: int | None = None  # of one answer
    max_model_len: int | None = None
    max_positions: int | None = None  # of the head

    def num_drafts(self, mask: Sequence[bool], k: int) -> list[int]:
        """[n]: how many of k drafts a request asks for whose newest token is the n-th."""
        num_tokens = torch.arange(1, len(mask) + 1)
        ends = torch.full_like(num_tokens, _or_far(self.max_model_len))
        if self.max_tokens is not None:
            starts = num_tokens - torch.tensor(_num_outputs(mask))
            ends = torch.minimum(ends, starts + self.max_tokens)
        wanted = torch.full_like(num_tokens, k)
        positions = torch.full_like(num_tokens, _or_far(self.max_positions))
        drafts: list[int] = draft_limit(wanted, num_tokens, ends, positions, FAR).tolist()
        return drafts


def _or_far(limit: int | None) -> int:
    return FAR if limit is None else limit


def _num_outputs(mask: Sequence[bool]) -> list[int]:
    """[n]: tokens of its answer up to and with each token; 0 in a prompt."""
    counts, outputs = [], 0
    for wrote in mask:
        outputs = outputs + 1 if wrote else 0
        counts.append(outputs)
    return counts


UNLIMITED = Limits()


class ReplayStep(NamedTuple):
    """Where an engine may stand: at its newest token, with `left` tokens of the answer to come."""

    newest: int
    left: int
    num_drafts: int

    def accepted(self, leading: Sequence[int]) -> int:
        """`leading` [n]: right drafts in a row when drafting starts at this anchor."""
        return min(leading[self.newest - 1], self.num_drafts, self.left)


def steps(mask: Sequence[bool], k: int, limits: Limits = UNLIMITED) -> list[ReplayStep | None]:
    """[n]: the step that K = k takes at each token; None where no step can start."""
    found: list[ReplayStep | None] = []
    lengths, drafts = run_lengths(mask), limits.num_drafts(mask, k)
    for newest, wrote in enumerate(mask):
        left = lengths[newest] - 1 if wrote and newest > 0 else 0
        found.append(ReplayStep(newest, left, drafts[newest]) if left > 0 else None)
    return found


def run_lengths(mask: Sequence[bool]) -> list[int]:
    """[n]: how many True in a row start at each place."""
    lengths = [0] * (len(mask) + 1)
    for place in reversed(range(len(mask))):
        lengths[place] = lengths[place + 1] + 1 if mask[place] else 0
    return lengths[:-1]


def replay(
    mask: Sequence[bool], leading: Sequence[int], k: int, limits: Limits = UNLIMITED
) -> SpecDecodeStats:
    """What an engine with K = k counts.

    mask     # [n] the target wrote this token
    leading  # [n] right drafts in a row when drafting starts at this anchor
    """
    stats = SpecDecodeStats()
    for _, num_drafts, accepted in visited_steps(mask, leading, k, limits):
        stats.observe(num_drafts, accepted)
    return stats


def visited_steps(
    mask: Sequence[bool], leading: Sequence[int], k: int, limits: Limits = UNLIMITED
) -> Iterator[tuple[int, int, int]]:
    """The steps that an engine with K = k takes: newest token, drafts, accepted drafts."""
    at = steps(mask, k, limits)
    newest = 0
    while newest < len(mask):
        step = at[newest]
        if step is None:
            newest += 1
            continue
        accepted = step.accepted(leading)
        yield newest, step.num_drafts, accepted
        newest += min(accepted + 1, step.left)


def all_steps(
    mask: Sequence[bool], leading: Sequence[int], k: int, limits: Limits = UNLIMITED
) -> Iterator[tuple[int, int, int]]:
    """The same for every step that may be taken, whether the others lead to it or not."""
    for step in steps(mask, k, limits):
        if step is not None:
            yield step.newest, step.num_drafts, step.accepted(leading)


@dataclass
class ExpectedStats:
    """Means of the counters of `SpecDecodeStats`, over the noise that sampling uses."""

    num_drafts: float = 0.0
    reached_per_pos: list[float] = field(default_factory=list)
    accepted_per_pos: list[float] = field(default_factory=list)

    def merge(self, other: ExpectedStats) -> None:
        self.num_drafts += other.num_drafts
        for mine, its in (
            (self.reached_per_pos, other.reached_per_pos),
            (self.accepted_per_pos, other.accepted_per_pos),
        ):
            mine += [0.0] * (len(its) - len(mine))
            for position, value in enumerate(its):
                mine[position] += value

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + sum(self.per_position_acceptance)

    @property
    def per_position_acceptance(self) -> list[float]:
        return [x / self.num_drafts if self.num_drafts else 0.0 for x in self.accepted_per_pos]

    @property
    def conditional_acceptance(self) -> list[float]:
        pairs = zip(self.accepted_per_pos, self.reached_per_pos, strict=True)
        return [a / r if r else 0.0 for a, r in pairs]


def expected_replay(
    mask: Sequence[bool], chances: Sequence[Sequence[float]], k: int, limits: Limits = UNLIMITED
) -> ExpectedStats:
    """The same where each draft is right by chance: the mean over all replays, exactly.

    chances  # [n][K] of the draft at (anchor, depth), given that all before it were right
    """
    stats = ExpectedStats(0.0, [0.0] * k, [0.0] * k)
    visits = [0.0] * (len(mask) + 1)  # chance that a step starts at this token
    for newest, step in enumerate(steps(mask, k, limits)):
        if step is None:
            continue
        is_first = newest == 1 or not mask[newest - 1]
        weight = 1.0 if is_first else visits[newest]
        stats.num_drafts += weight * (step.num_drafts > 0)
        for depth in range(step.num_drafts):
            stats.reached_per_pos[depth] += weight
            right = weight * chances[newest - 1][depth] if depth < step.left else 0.0
            stats.accepted_per_pos[depth] += right
            visits[newest + min(depth + 1, step.left)] += weight - right
            weight = right
        visits[newest + min(step.num_drafts + 1, step.left)] += weight
    return stats
