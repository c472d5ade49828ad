"""Which cells a grid has, and in which order they run."""

from __future__ import annotations

from typing import Any

import pytest

from peagle.bench.results.settings import Setting
from peagle.bench.run.driver import Load
from peagle.bench.run.grid import (
    GridCell,
    HeadLimits,
    PlannedRun,
    grid_settings,
    make_cells,
    run_order,
)
from peagle.bench.run.plan import make_plan
from peagle.cli.bench_progress import TimeLeft, duration_in_words
from peagle.errors import ConfigError

P_EAGLE = HeadLimits("p", "p-eagle", 4, 8)
EAGLE3 = HeadLimits("e", "eagle3", 3, 64)


def plan(**given: Any) -> Any:
    return make_plan({"model": "m", "out": "o", **given}, "here")


def test_every_method_at_every_depth_and_none_first() -> None:
    asked = plan(spec_model="p,e", spec_method="ngram,p-eagle,eagle3", spec_tokens="3,5")
    found, notes = grid_settings(asked, [P_EAGLE, EAGLE3])
    assert found[0] == Setting("none")
    assert {(d.method, d.num_speculative_tokens) for d in found[1:]} == {
        (m, k) for m in ("ngram", "p-eagle", "eagle3") for k in (3, 5)
    }
    assert not notes


def test_depth_defaults_to_the_heads_advice() -> None:
    found, _ = grid_settings(plan(spec_model="p"), [P_EAGLE])
    assert found == [Setting("none"), Setting("p-eagle", 4, "p")]


def test_depths_that_a_head_cannot_reach_are_left_out_with_a_note() -> None:
    found, notes = grid_settings(plan(spec_model="p", spec_tokens="7,11"), [P_EAGLE])
    assert [d.num_speculative_tokens for d in found] == [0, 7]
    assert "at most 8" in notes[0]
    with pytest.raises(ConfigError, match="at most 8"):
        grid_settings(plan(spec_model="p", spec_tokens="11"), [P_EAGLE])


def test_method_without_its_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="eagle3 needs a head"):
        grid_settings(plan(spec_method="eagle3"), [])
    with pytest.raises(ConfigError, match="p is a head for p-eagle, not eagle3"):
        grid_settings(plan(spec_model="p", spec_method="eagle3"), [P_EAGLE])


def cells() -> list[GridCell]:
    asked = plan(spec_model="p", spec_tokens="3,5", concurrency="4,1", request_rate="2")
    return make_cells(asked, grid_settings(asked, [P_EAGLE])[0], ["w", "v"])


def test_grid_is_the_product_with_the_least_load_first() -> None:
    found = cells()
    assert len(found) == len(set(found)) == 3 * 3 * 2
    assert found[0] == GridCell(Setting("none"), Load(1, None), "w")


def test_interleaved_rounds_run_all_cells_before_any_runs_again() -> None:
    found = cells()
    order = list(run_order(found, 3, interleave=True))
    rounds = [order[n * len(found) : (n + 1) * len(found)] for n in range(3)]
    for number, one in enumerate(rounds):
        assert {t.cell for t in one} == set(found)
        assert {t.repeat for t in one} == {number}
    assert [t.cell for t in rounds[1]] == found[::-1]  # against a steady drift
    assert [t.cell for t in rounds[2]] == found


def test_without_interleaving_a_cells_repeats_follow_each_other() -> None:
    order = list(run_order(cells()[:2], 2, interleave=False))
    assert [t.repeat for t in order] == [0, 1, 0, 1]
    assert len({t.cell for t in order[:2]}) == 1


def test_time_left_is_that_of_the_same_cells_or_the_mean() -> None:
    a, b, c = (PlannedRun(cell, 0) for cell in cells()[:3])
    left = TimeLeft([a, b, c, PlannedRun(a.cell, 1)])
    assert left.estimate() is None
    left.finish(a, 10.0)
    left.finish(b, 20.0)
    assert left.estimate() == 15.0 + 10.0
    assert [duration_in_words(s) for s in (48, 720, 11100)] == ["48 s", "12 min", "3 h 05 min"]
