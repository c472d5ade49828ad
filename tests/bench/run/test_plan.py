"""Keys of a grid from flags and files, its cells, and the order in which they run."""

from __future__ import annotations

import re
from pathlib import Path
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
from peagle.bench.run.null_backend import NullBackend
from peagle.bench.run.plan import BenchPlan, make_plan
from peagle.bench.run.sessions import Engines, engine_config, vllm_options
from peagle.cli.bench_progress import TimeLeft
from peagle.cli.progress import duration_in_words
from peagle.config import read_yaml
from peagle.errors import ConfigError


def plan(**given: Any) -> BenchPlan:
    return make_plan({"model": "m", "out": "o", **given}, "here")


def test_flags_and_a_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(
        "model: m\nout: o\nspec-model: [a, b]\nspec_tokens: [3, 5]\nconcurrency: 4\n"
        "request_rate: [0.5, 2]\nworkload: [offline, 'synthetic:8,4']\nmax_tokens: 64\n"
    )
    flags = {
        "spec_model": "a,b",
        "spec_tokens": "3,5",
        "concurrency": "4",
        "max_tokens": 64,
        "request_rate": "0.5,2",
        "workload": "offline,synthetic:8,4",
    }
    assert make_plan(read_yaml(file), "file") == plan(**flags)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec_tokns": "3"}, "unknown key 'spec_tokns' .*did you mean 'spec_tokens'"),
        ({"concurrency": "1,x"}, r"concurrency\.1='x' does not fit"),
        ({"request_rate": "inf"}, "request_rate=inf is out of range"),
        ({"temperature": float("nan")}, "temperature=nan is out of range"),
        ({"concurrency": [1.5]}, r"concurrency\.0=1.5 does not fit"),
        ({"concurrency": "0"}, "concurrency=0 is out of range"),
        ({"request_rate": "-1"}, "request_rate=-1.0 is out of range"),
        ({"repeats": 0}, "repeats=0"),
        ({"repeats": "three"}, "repeats='three' does not fit"),
        ({"raw": "perhaps"}, "raw='perhaps' does not fit"),
        ({"spec_tokens": "3"}, "no drafter"),
        ({"spec_method": "medusa"}, "medusa is unknown"),
        ({"backend": "tensorrt"}, "backend 'tensorrt' is unknown"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype has no effect on backend embedded"),
        ({"backend": "http://x", "device": "cpu"}, "device has no effect"),
        ({"backend": "http://x", "spec_model": "a"}, "the one drafter that its server"),
        ({"backend": "http://x", "spec_method": "p-eagle", "spec_tokens": "3,5"}, "one drafter"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(**given)
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize("missing", ["model", "out"])
def test_model_and_out_are_needed(missing: str) -> None:
    given = {"model": "m", "out": "o"}
    del given[missing]
    with pytest.raises(ConfigError, match=f"does not set {missing}"):
        make_plan(given, "here")


def test_broken_yaml_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    file.write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(file)
    file.write_text("- a")
    with pytest.raises(ConfigError, match="not a mapping"):
        read_yaml(file)


def test_engine_has_room_for_all_streams_unless_told() -> None:
    assert engine_config(plan(concurrency="1,128")).max_num_seqs == 128
    assert engine_config(plan(concurrency="128", max_num_seqs=8)).max_num_seqs == 8


def test_engines_of_one_gpu_share_its_memory() -> None:
    settings = [Setting("none"), Setting("ngram", 2), Setting("ngram", 5)]
    asked = []

    def build(model: str, config: Any, drafter: Any, vllm: Any) -> Any:
        asked.append(config.gpu_memory_utilization)
        return NullBackend()

    engines = Engines(plan(gpu_memory_utilization=0.8), settings, build)
    for setting in settings:
        engines.get(setting)
    assert asked == pytest.approx([0.4, 0.8])  # ngram's engine serves both depths


def test_vllm_gets_its_own_kinds_of_quantization() -> None:
    given = plan(backend="vllm", quantization="awq", max_num_seqs=8)
    assert engine_config(given).quantization is None
    options = vllm_options(given)
    assert options is not None
    assert (options.quantization, options.max_num_seqs) == ("awq", 8)
    assert vllm_options(plan(quantization="fp8")) is None
    assert engine_config(plan(quantization="fp8")).quantization == "fp8"


def test_one_stream_is_the_default_unless_rates_are_given() -> None:
    assert plan().concurrencies == [1]
    assert plan(request_rate="3").concurrencies == []


P_EAGLE = HeadLimits("p", "p-eagle", 4, 8, 8)
EAGLE3 = HeadLimits("e", "eagle3", 3, 64, 6)


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


def test_trees_stand_beside_the_chains_of_every_drafter() -> None:
    methods = "ngram,p-eagle,eagle3"
    asked = plan(spec_method=methods, spec_model="p,e", spec_tokens="1,4,9", spec_nodes="7,15")
    found, notes = grid_settings(asked, [P_EAGLE, EAGLE3])
    trees = [
        (s.method, s.num_speculative_tokens, s.num_draft_nodes) for s in found if s.num_draft_nodes
    ]
    own = [(1, 7), (4, 7), (4, 15)]
    assert trees == [
        *(("ngram", *n) for n in [*own, (9, 7), (9, 15)]),
        *(("p-eagle", *n) for n in own),
        *(("eagle3", *n) for n in own),
    ]
    assert len(found) == 1 + 3 + 2 + 3 + len(trees)
    assert set(notes) == {
        "trees of depth 1 have at most 8 nodes; larger ones are left out",
        f"{P_EAGLE.reference} drafts at most 8 tokens; deeper K is left out",
        f"trees of {EAGLE3.reference} are at most 8 deep; deeper ones are left out",
    }
    with pytest.raises(ConfigError, match="no setting can draft such trees"):
        grid_settings(plan(spec_model="e", spec_tokens="9", spec_nodes="7"), [EAGLE3])
    with pytest.raises(ConfigError, match="only the embedded engine drafts trees"):
        plan(spec_model="p", spec_nodes="7", backend="vllm")


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


def test_auto_stands_beside_fixed_settings_or_alone() -> None:
    asked = plan(spec_model="p,e", spec_tokens="3", speculation="auto,fixed")
    found, _ = grid_settings(asked, [P_EAGLE, EAGLE3])
    names = [(s.name, s.is_auto) for s in found]
    assert names == [
        ("none", False),
        *(("p-eagle auto", True), ("p-eagle", False)),
        *(("eagle3 auto", True), ("eagle3", False)),
    ]
    assert [s.num_speculative_tokens for s in found if s.is_auto] == [7, 6]
    alone, _ = grid_settings(plan(spec_model="p", speculation="auto"), [P_EAGLE])
    assert [(s.name, s.num_draft_nodes) for s in alone] == [("none", None), ("p-eagle auto", None)]
    with pytest.raises(ConfigError, match="only the embedded engine chooses"):
        plan(spec_model="p", speculation="auto", backend="vllm")
    ngram, _ = grid_settings(plan(spec_method="ngram", speculation="auto"), [])
    assert [s.name for s in ngram] == ["none", "ngram auto"]
    with pytest.raises(ConfigError, match="auto was given, but no drafter"):
        plan(speculation="auto")
    with pytest.raises(ConfigError, match="--speculation adaptive is unknown"):
        plan(spec_model="p", speculation="adaptive")


def test_an_engine_that_chooses_serves_no_other_setting() -> None:
    settings = [
        Setting("p-eagle", 7, "p", is_auto=True),
        Setting("p-eagle", 3, "p"),
        Setting("p-eagle", 5, "p"),
    ]
    built: list[object] = []

    def build(model: object, config: object, drafter: object, vllm: object) -> NullBackend:
        built.append(drafter)
        return NullBackend()

    engines = Engines(plan(spec_model="p"), settings, build)
    for setting in settings:
        engines.get(setting)
    chosen = [(d.speculation, d.num_speculative_tokens) for d in built]  # type: ignore[attr-defined]
    assert chosen == [("auto", None), (None, 5)]
