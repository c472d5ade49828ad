"""OTPS from step costs and acceptance: what speculation would gain where nobody has measured.

While `concurrency` requests decode, a step yields `acceptance length` tokens for each of them:
OTPS = concurrency x length / seconds of a step. Prefill and waiting are left out.

`validate` predicts the cells of a bench result, which says how far the model can be trusted. Two
errors for each cell. `own`: the cell's own step times and acceptance, so only what a step's clock
does not see (harness, waiting, the ends of answers) is left. `left out`: step times and acceptance
from the neighbouring K and concurrencies alone, as for a point nobody has measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean, median

from peagle.bench.results.document import Cell, Results
from peagle.bench.results.settings import NONE, Setting, setting_of, usable_runs
from peagle.bench.simulate.acceptance import Profile, profile_of_cells
from peagle.bench.simulate.step_costs import MeasuredCosts, StepCosts, steps_of
from peagle.errors import ConfigError, DataError


@dataclass(frozen=True)
class Prediction:
    method: str
    num_speculative_tokens: int
    concurrency: int
    plain_otps: float
    otps: float
    acceptance_length: float
    break_even_length: float  # the acceptance length at which speculation gains nothing
    num_draft_nodes: int | None = None  # of trees; where the engine chooses, what it would choose
    is_auto: bool = False

    @property
    def gain(self) -> float:
        return self.otps / self.plain_otps

    @property
    def setting(self) -> Setting:
        nodes = None if self.is_auto else self.num_draft_nodes
        return Setting(self.method, self.num_speculative_tokens, None, nodes, self.is_auto)


def predict(
    costs: StepCosts,
    method: str,
    profile: Profile,
    *,
    k: int,
    concurrency: int,
    context: int,
    nodes: int | None = None,
) -> Prediction:
    plain_step = costs.plain(concurrency, context)
    step = costs.speculative(method, k, concurrency, context, nodes)
    length = profile.length(k, nodes)
    return Prediction(
        method=method,
        num_speculative_tokens=k,
        concurrency=concurrency,
        plain_otps=concurrency / plain_step,
        otps=concurrency * length / step,
        acceptance_length=length,
        break_even_length=step / plain_step,
        num_draft_nodes=nodes,
    )


def predict_auto(
    costs: StepCosts, method: str, profile: Profile, *, k: int, concurrency: int, context: int
) -> Prediction:
    """An engine that knows what drafts are worth and what rows cost, with trees of depth `k`: the
    fastest number of nodes, or no drafts."""
    from peagle.speculation.budget import TREE_NUMBERS  # numpy, which --help does without

    plain = Prediction(
        method,
        k,
        concurrency,
        plain_otps=(otps := concurrency / costs.plain(concurrency, context)),
        otps=otps,
        acceptance_length=1.0,
        break_even_length=1.0,
        num_draft_nodes=0,
    )
    choices = [plain]
    for nodes in TREE_NUMBERS:
        with suppress(ConfigError):  # beyond what is known
            place = {"k": k, "concurrency": concurrency, "context": context}
            choices.append(predict(costs, method, profile, nodes=nodes, **place))
    return replace(max(choices, key=lambda choice: choice.otps), is_auto=True)


def predict_grid(
    costs: StepCosts,
    profiles: Mapping[str, Profile],
    *,
    ks: Sequence[int],
    concurrencies: Sequence[int],
    context: int,
    nodes: Sequence[int] = (),
) -> list[Prediction]:
    """Every method with a profile, at every K and concurrency; where the profile has trees, also
    of each number of nodes and as the engine chooses."""
    if nodes and not any(profile.trees for profile in profiles.values()):
        raise ConfigError(
            "the acceptance of trees is not known",
            hint="take it from peagle evaluate --spec-nodes or from peagle bench --spec-nodes",
        )
    found: list[Prediction] = []
    for method, profile in profiles.items():
        for load in concurrencies:
            place = {"concurrency": load, "context": context}
            found += [predict(costs, method, profile, k=k, **place) for k in ks if profile.lengths]
            found += [
                predict(costs, method, profile, k=k, nodes=n, **place)
                for k in profile.trees
                for n in nodes
            ]
            if profile.trees:
                deepest = max(profile.trees)
                found.append(predict_auto(costs, method, profile, k=deepest, **place))
    return found


def best_by_concurrency(predictions: Sequence[Prediction]) -> dict[int, Prediction | None]:
    """The fastest; None where no setting is faster than plain decoding."""
    best: dict[int, Prediction | None] = {}
    for p in predictions:
        best.setdefault(p.concurrency, None)
        leader = best[p.concurrency]
        if p.gain > 1 and (leader is None or p.otps > leader.otps):
            best[p.concurrency] = p
    return best


@dataclass(frozen=True)
class CheckedCell:
    setting: Setting
    workload: str
    concurrency: int
    measured_otps: float
    own: float  # predicted OTPS
    left_out: float | None  # None: no neighbours on both sides


@dataclass(frozen=True)
class PredictionErrors:
    """Shares of the measured OTPS, without sign."""

    median: float
    worst: float
    num_cells: int


@dataclass(frozen=True)
class Validation:
    cells: tuple[CheckedCell, ...]
    own: PredictionErrors
    left_out: PredictionErrors | None


def validate(results: Results) -> Validation:
    timed = [cell for cell in results.fixed if cell.concurrency and steps_of(cell)]
    if not timed:
        raise DataError(
            "no cell has step times to predict from",
            hint="run peagle bench on the embedded engine: others report no draft and verify times",
        )
    checked = tuple(
        _check(cell, [c for c in timed if c.workload == cell.workload]) for cell in timed
    )
    own = [abs(c.own / c.measured_otps - 1) for c in checked]
    other = [abs(c.left_out / c.measured_otps - 1) for c in checked if c.left_out is not None]
    return Validation(checked, _errors(own), _errors(other) if other else None)


def _check(cell: Cell, workload: Sequence[Cell]) -> CheckedCell:
    assert cell.concurrency is not None
    others = [
        c for c in workload if c is not cell and (c.method, c.head) == (cell.method, cell.head)
    ]
    return CheckedCell(
        setting=setting_of(cell),
        workload=cell.workload,
        concurrency=cell.concurrency,
        measured_otps=fmean(run.otps for run in usable_runs(cell)),
        own=_predict(cell, [cell]),
        left_out=_predict_or_none(cell, others),
    )


def _predict(cell: Cell, sources: Sequence[Cell]) -> float:
    """OTPS of `cell` from step times and acceptance of `sources`."""
    assert cell.concurrency is not None
    costs = MeasuredCosts(tuple(step for source in sources for step in steps_of(source)))
    if cell.method == NONE:
        return cell.concurrency / costs.plain(cell.concurrency, 0)
    profile = profile_of_cells(sources)
    if profile is None:
        raise ConfigError("no neighbour has drafts")
    k, nodes = cell.num_speculative_tokens, cell.num_draft_nodes
    step = costs.speculative(cell.method, k, cell.concurrency, 0, nodes)
    return cell.concurrency * profile.length(k, nodes) / step


def _predict_or_none(cell: Cell, sources: Sequence[Cell]) -> float | None:
    try:
        return _predict(cell, sources)
    except ConfigError:  # outside of what the others measured
        return None


def _errors(shares: Sequence[float]) -> PredictionErrors:
    return PredictionErrors(median(shares), max(shares), len(shares))
