"""Expected acceptance of sampled drafts over text that the target sampled.

Exact given the text: whether a draft is kept depends on the noise of its own position, so the
chances of a replay's steps multiply (`expected_replay`). The text must have been sampled with the
same temperature and filters, or its tokens do not follow the distribution that verifies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.evaluate.evaluator import Document, Drafted, Evaluation, Evaluator, summed
from peagle.evaluate.replay import ExpectedStats, expected_replay
from peagle.kernels.cpu.linear import Weight
from peagle.models.layers import at_least_float32, linear
from peagle.sampling_params import SamplingParams
from peagle.speculation.acceptance import coupled_given_text, rejection_given_text
from peagle.speculation.sampling import SamplingRows, filter_logits, probabilities
from peagle.teacher_forcing.draft_model import DraftModel

WAYS = ("coupled", "rejection")  # as SpeculativeConfig.verification names them


@dataclass(frozen=True)
class SampledAcceptance:
    """Both verifications, from the target's distribution and the drafter's at each element."""

    target_table: Weight  # [V, H]
    params: SamplingParams
    adjusted: Callable[[Tensor], Tensor] | None = None  # logits, as the target changes them

    def __call__(self, drafted: Drafted) -> Tensor:
        """[2, C], in the order of WAYS."""
        states = drafted.states[drafted.slots].to(drafted.normed.dtype)
        logits = at_least_float32(linear(states, self.target_table))
        p = self._probs(logits if self.adjusted is None else self.adjusted(logits))
        q = torch.zeros_like(p)
        q[:, drafted.target_ids] = self._probs(
            at_least_float32(linear(drafted.normed, drafted.table))
        )
        labels = drafted.labels
        return torch.stack((coupled_given_text(p, q, labels), rejection_given_text(p, q, labels)))

    def _probs(self, logits: Tensor) -> Tensor:
        rows = SamplingRows(
            *(
                torch.full((len(logits),), value, device=logits.device)
                for value in (
                    float(self.params.temperature),
                    max(self.params.top_k, 0),
                    float(self.params.top_p),
                    float(self.params.min_p),
                )
            )
        )
        return probabilities(filter_logits(logits, rows))


def evaluate_sampled(
    evaluator: Evaluator, model: DraftModel, rule: SampledAcceptance
) -> dict[str, Evaluation]:
    """An evaluation for each verification."""
    replays: dict[str, list[tuple[list[str], list[ExpectedStats]]]] = {way: [] for way in WAYS}
    for document in evaluator.documents(model, rule):
        for number, way in enumerate(WAYS):
            found = _replays(document, number, evaluator.max_tokens)
            replays[way].append((document.groups, found))
    k = evaluator.max_tokens
    return {way: summed(found, k, ExpectedStats) for way, found in replays.items()}


def _replays(document: Document, way: int, max_tokens: int) -> list[ExpectedStats]:
    chances = document.chances[way].tolist()
    ks = range(1, max_tokens + 1)
    return [expected_replay(document.mask, chances, k, document.limits) for k in ks]
