"""How draft tokens are drawn: as the target will draw, from the drafter's law.

A greedy request gets the argmax. A sampled one gets a draw under its own temperature and filters;
with coupled verification from the very noise that the target will use at that position, which
makes both agree far more often than independent draws would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.config import Verification
from peagle.engine.request import Request
from peagle.engine.sampler import row_settings
from peagle.models.drafter import Choice
from peagle.speculation.noise import gumbel_noise
from peagle.speculation.sampling import filter_logits, greedy, nan_rows, probabilities, sample


class DraftChooser:
    """Implements models.drafter.Chooser for the requests of one batch."""

    def __init__(
        self, requests: Sequence[Request], vocab_size: int, verification: Verification
    ) -> None:
        self.requests = requests
        self.vocab_size = vocab_size
        self.by_rejection = verification == "rejection"

    def __call__(
        self, logits: Tensor, sequences: Sequence[int], depths: Sequence[int], ids: Tensor | None
    ) -> Choice:
        tokens = greedy(logits)  # [R], draft ids
        sampled = [r for r, s in enumerate(sequences) if not self.requests[s].params.greedy]
        laws = None
        if sampled:
            requests = [self.requests[sequences[r]] for r in sampled]
            usable = _without_nan(logits[sampled])
            filtered = filter_logits(
                usable, row_settings(requests, [1] * len(sampled), usable.device)
            )
            noise = self._noise(requests, [depths[r] for r in sampled], logits.device)
            tokens[sampled] = sample(filtered, noise if ids is None else noise[:, ids])
            if self.by_rejection:
                laws = self._laws(tokens, sampled, filtered, ids)
        return Choice(tokens if ids is None else ids[tokens], laws)

    def _noise(
        self, requests: Sequence[Request], depths: Sequence[int], device: torch.device
    ) -> Tensor:
        """Gumbel noise over the target's ids [R, V]. Rejection may use the same: there the target
        draws with coins, which are independent of it."""
        seeds = [r.seed for r in requests]
        positions = [r.num_outputs + d for r, d in zip(requests, depths, strict=True)]
        return gumbel_noise(
            torch.tensor(seeds, device=device),
            torch.tensor(positions, device=device),
            self.vocab_size,
        )

    def _laws(
        self, tokens: Tensor, sampled: list[int], filtered: Tensor, ids: Tensor | None
    ) -> Tensor:
        """Probabilities over the target's ids [R, V]; rows of greedy requests are one-hot."""
        laws = torch.zeros(len(tokens), self.vocab_size, device=tokens.device)
        laws[torch.arange(len(tokens)), tokens if ids is None else ids[tokens]] = 1.0
        columns = torch.arange(self.vocab_size, device=tokens.device) if ids is None else ids
        sampled_laws = torch.zeros(len(sampled), self.vocab_size, device=tokens.device)
        sampled_laws[:, columns] = probabilities(filtered)
        laws[sampled] = sampled_laws
        return laws


def _without_nan(logits: Tensor) -> Tensor:
    """Rows that say nothing become even: a broken drafter costs acceptance, never a request."""
    return logits.masked_fill(nan_rows(logits).unsqueeze(1), 0.0)
