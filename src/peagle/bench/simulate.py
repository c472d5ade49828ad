"""OTPS from step costs and acceptance: what speculation would gain where nobody has measured.

While `concurrency` requests decode, a step yields `acceptance length` tokens for each of them:
OTPS = concurrency x length / seconds of a step. Prefill and waiting are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peagle.bench.acceptance import Profile
from peagle.bench.step_costs import StepCosts


@dataclass(frozen=True)
class Prediction:
    method: str
    num_speculative_tokens: int
    concurrency: int
    plain_otps: float
    otps: float
    acceptance_length: float
    break_even_length: float  # the acceptance length at which speculation gains nothing

    @property
    def gain(self) -> float:
        return self.otps / self.plain_otps


def predict(
    costs: StepCosts,
    method: str,
    profile: Profile,
    *,
    k: int,
    concurrency: int,
    context: int,
) -> Prediction:
    plain_step = costs.plain(concurrency, context)
    step = costs.speculative(method, k, concurrency, context)
    length = profile.length(k)
    return Prediction(
        method=method,
        num_speculative_tokens=k,
        concurrency=concurrency,
        plain_otps=concurrency / plain_step,
        otps=concurrency * length / step,
        acceptance_length=length,
        break_even_length=step / plain_step,
    )


def predict_grid(
    costs: StepCosts,
    profiles: Mapping[str, Profile],
    *,
    ks: Sequence[int],
    concurrencies: Sequence[int],
    context: int,
) -> list[Prediction]:
    """Every method with a profile, at every K and concurrency."""
    return [
        predict(costs, method, profile, k=k, concurrency=concurrency, context=context)
        for method, profile in profiles.items()
        for concurrency in concurrencies
        for k in ks
    ]


def best_by_concurrency(predictions: Sequence[Prediction]) -> dict[int, Prediction | None]:
    """The fastest; None where no setting is faster than plain decoding."""
    best: dict[int, Prediction | None] = {}
    for p in predictions:
        best.setdefault(p.concurrency, None)
        leader = best[p.concurrency]
        if p.gain > 1 and (leader is None or p.otps > leader.otps):
            best[p.concurrency] = p
    return best
