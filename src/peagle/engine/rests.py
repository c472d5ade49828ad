"""Which requests are left to the target alone, because a drafter would only slow them down.

With many requests drafts do not pay, and a drafter that none are asked of still reads all that is
said, so that it can draft later: a tenth of the time. Requests that start under such a load rest:
they have no drafts and no rows in the drafter's cache. When drafts pay again, those come back that
gain more than it takes to compute what they know once more. Under CUDA graphs, where rows are
padded, nothing would be gained.
"""

from __future__ import annotations

from collections.abc import Sequence

from peagle.engine.request import Request
from peagle.speculation.budget import DraftBudget

SAMPLE_EVERY = 64  # one of so many requests has drafts for all that, to see whether they pay
WAKE_EVERY = 16  # steps between two looks whether requests are to have drafts again
# By what drafts must make a request faster: to start with them; to compute what it knows again.
GAIN_TO_START, GAIN_TO_WAKE = 0.95, 1.1


class Rests:
    def __init__(self, budget: DraftBudget) -> None:
        self.budget = budget
        self._mean_answer = 256.0  # tokens of answers lately; at first a guess
        self._num_asked = self._num_steps = 0

    def starts(self, request: Request, load: int) -> bool:
        """Whether a request rests that is about to start; `load`: requests that will run."""
        if request.has_rested or not request.num_speculative_tokens:
            return False
        self._num_asked += 1
        if self._num_asked % SAMPLE_EVERY == 1:
            return False
        gain = self.budget.gain(load, self._answer(request), prompt=request.num_tokens)
        return gain < GAIN_TO_START

    def woken(self, resting: Sequence[Request], load: int) -> Request | None:
        """One that is to come again with drafts: each does so once."""
        self._num_steps += 1
        if self._num_steps % WAKE_EVERY or not resting:
            return None
        request = max(resting, key=lambda r: r.max_tokens - r.num_tokens)
        gain = self.budget.gain(load, self._answer(request), again=request.num_tokens)
        if gain < GAIN_TO_WAKE:
            return None
        request.has_rested = True
        return request

    def ended(self, request: Request) -> None:
        self._mean_answer += (request.num_outputs - self._mean_answer) / 16

    def _answer(self, request: Request) -> int:
        """Tokens that it is still to write: as many as others write, or as it has written."""
        left, said = request.max_tokens - request.num_outputs, request.num_outputs
        return max(min(left, max(int(self._mean_answer) - said, said)), 1)
