"""Acceptance counters of speculative decoding, under vLLM's names. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass
class SpecDecodeStats:
    """Counters of one request, or with `merge` of many. All start at zero.

    Lists are indexed by draft position (0 is the first draft) and are as long as the deepest
    draft seen. `observe` does not touch `num_output_tokens` or the times: the caller counts
    those, because a stop token can cut a step's tokens short and prefill yields one as well.
    """

    num_steps: int = 0  # all decode steps, with or without drafts
    num_drafts: int = 0  # decode steps that verified at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    # Steps with a draft there behind an accepted one; of a tree, behind the last that was.
    num_reached_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    # Zero unless the engine chooses how many drafts a step verifies:
    num_offered_tokens: int = 0  # drafts that requests may have had
    num_expected_tokens: float = 0.0  # drafts that were expected to be accepted
    num_output_tokens: int = 0
    draft_time: float = 0.0  # seconds, as are the next two
    verify_time: float = 0.0
    other_time: float = 0.0

    def observe(
        self,
        num_draft: int,
        num_accepted: int,
        times: int = 1,
        depth: int | None = None,
        *,
        is_leaf: bool = False,
    ) -> None:
        """Counts one decode step of one request, or `times` alike: of `num_draft` drafts, the
        first `num_accepted` were kept. One without drafts (0, 0) counts in `num_steps` alone.
        Of a tree, `num_draft` are its nodes and `depth` the positions that they share; `is_leaf`:
        no node stood behind the last that was kept, so none was rejected."""
        assert 0 <= num_accepted <= num_draft, (num_draft, num_accepted)
        self.num_steps += times
        if num_draft == 0:
            return
        self.num_drafts += times
        self.num_draft_tokens += num_draft * times
        self.num_accepted_tokens += num_accepted * times
        drafted = self.num_draft_tokens_per_pos
        reached = self.num_reached_tokens_per_pos
        accepted = self.num_accepted_tokens_per_pos
        num_positions = num_draft if depth is None else min(num_draft, depth)
        for per_pos in (drafted, reached, accepted):
            if len(per_pos) < num_positions:
                per_pos.extend([0] * (num_positions - len(per_pos)))
        for position in range(num_positions):
            drafted[position] += times
        for position in range(num_accepted):
            reached[position] += times
            accepted[position] += times
        if num_accepted < num_positions and not is_leaf:
            reached[num_accepted] += times  # the rejected draft was reached too

    def merge(self, other: SpecDecodeStats) -> None:
        """Adds the counters and times of `other` to these."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            summed = _add(mine, value) if isinstance(value, list) else mine + value
            setattr(self, name, summed)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification step, the bonus token included; 1.0 if nothing was drafted."""
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def mean_draft_tokens(self) -> float:
        """Draft tokens per decode step, those without any included."""
        return _ratio(self.num_draft_tokens, self.num_steps)

    @property
    def expected_acceptance_length(self) -> float | None:
        """What the engine counted on where `mean_acceptance_length` came; None: it does not."""
        if not self.num_offered_tokens:
            return None
        return 1.0 + _ratio(self.num_expected_tokens, self.num_drafts)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per draft; 0.0 if nothing was drafted."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def per_position_acceptance(self) -> list[float]:
        """Share of verification steps whose draft at each position was accepted, as vLLM counts.

        Unconditional: position i can only be accepted after 0..i-1 were, so the list never
        rises, and 1 + its sum is `mean_acceptance_length`. Steps that drafted fewer tokens than
        i+1 stay in the denominator and so pull it down.
        """
        return [_ratio(n, self.num_drafts) for n in self.num_accepted_tokens_per_pos]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Share of drafts accepted at each position, among those whose predecessors all were.

        This is the drafter's skill at a depth; steps without a draft there do not count.
        """
        pairs = zip(self.num_accepted_tokens_per_pos, self.num_reached_tokens_per_pos, strict=True)
        return [_ratio(accepted, reached) for accepted, reached in pairs]

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived numbers, ready for JSON."""
        return asdict(self) | {
            "mean_acceptance_length": self.mean_acceptance_length,
            "expected_acceptance_length": self.expected_acceptance_length,
            "mean_draft_tokens": self.mean_draft_tokens,
            "acceptance_rate": self.acceptance_rate,
            "per_position_acceptance": self.per_position_acceptance,
            "conditional_acceptance": self.conditional_acceptance,
        }


def _add(mine: list[int], others: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(mine, others, fillvalue=0)]


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
