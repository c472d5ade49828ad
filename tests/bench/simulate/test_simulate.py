"""Predictions: their limits, their directions, and their error against measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.bench.results.document import save_results
from peagle.bench.simulate.acceptance import Profile, profile_of_rates, profiles_of, read_profiles
from peagle.bench.simulate.predict import (
    best_by_concurrency,
    predict,
    predict_auto,
    predict_grid,
    validate,
)
from peagle.bench.simulate.roofline import (
    Assumptions,
    Gpu,
    RooflineCosts,
    decoder_shape,
    drafter_shape,
    find_gpu,
    gpu_table,
)
from peagle.bench.simulate.step_costs import measured_costs, measured_table
from peagle.errors import ConfigError, DataError, ModelError

from ..made import make_cell, make_results, modelled_cell, modelled_grid

LLAMA_8B = decoder_shape(
    {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "config.json",
)
METHODS = ("p-eagle", "eagle3", "ngram")
GPU = Gpu("made up", bandwidth=1e12, flops=1e14, memory_bytes=80e9)
IDEAL = Assumptions(
    bandwidth_share=1, cache_share=1, flops_share=1, kernel_overhead=0, step_overhead=0
)


def roofline(gpu: Gpu = GPU, assumed: Assumptions = IDEAL) -> RooflineCosts:
    drafters = {method: drafter_shape(method, LLAMA_8B) for method in METHODS}
    return RooflineCosts(gpu, LLAMA_8B, drafters, assumed=assumed)


def test_parameters_of_a_known_shape() -> None:
    # Llama-3.1-8B has 8.03e9 with its input embedding of 0.53e9, which no step multiplies.
    assert LLAMA_8B.num_parameters == pytest.approx(7.50e9, rel=0.01)


def test_one_request_costs_the_reading_of_all_weights() -> None:
    seconds = roofline().plain(1, 1)
    assert seconds == pytest.approx(LLAMA_8B.num_parameters * 2 / GPU.bandwidth, rel=0.001)


def test_a_long_context_costs_the_reading_of_its_cache() -> None:
    longer = roofline().plain(8, 20_000) - roofline().plain(8, 10_000)
    assert longer == pytest.approx(8 * 10_000 * 32 * 2 * 8 * 128 * 2 / GPU.bandwidth, rel=0.001)


def test_many_rows_cost_their_products() -> None:
    costs = roofline(replace(GPU, bandwidth=1e30))
    assert costs.plain(1000, 1) == pytest.approx(
        1000 * 2 * LLAMA_8B.num_parameters / GPU.flops, rel=0.001
    )


def test_infinite_bandwidth_and_products_leave_the_overheads() -> None:
    endless = Gpu("endless", bandwidth=1e40, flops=1e40, memory_bytes=1e40)
    assumed = replace(IDEAL, kernel_overhead=1e-6, step_overhead=1e-3)
    # 32 layers of 5 large and 4 small kernels, the logits, and the step's own overhead
    assert roofline(endless, assumed).plain(64, 4096) == pytest.approx(1e-3 + (32 * 9 + 1) * 1e-6)
    assert roofline(endless).speculative("p-eagle", 5, 64, 4096) == pytest.approx(0, abs=1e-12)


shares = st.lists(st.floats(0, 1), min_size=1, max_size=8).map(lambda x: sorted(x, reverse=True))
concurrencies = st.sampled_from([1, 3, 16, 200])
methods = st.sampled_from(METHODS)


@given(methods, st.integers(1, 8), concurrencies, st.integers(1, 50_000))
def test_without_acceptance_speculation_is_never_better(
    method: str, k: int, concurrency: int, context: int
) -> None:
    nothing = profile_of_rates([0.0] * 8)
    found = predict(roofline(), method, nothing, k=k, concurrency=concurrency, context=context)
    assert found.gain <= 1
    assert found.acceptance_length == 1


@given(methods, shares, concurrencies, st.floats(1.01, 100))
def test_more_bandwidth_is_never_slower(
    method: str, rates: list[float], concurrency: int, factor: float
) -> None:
    profile, k = profile_of_rates(rates), len(rates)
    slow, fast = (
        predict(
            roofline(replace(GPU, bandwidth=GPU.bandwidth * f)),
            method, profile, k=k, concurrency=concurrency, context=1024,
        )
        for f in (1, factor)
    )  # fmt: skip
    assert fast.otps >= slow.otps * (1 - 1e-12)
    assert fast.plain_otps >= slow.plain_otps * (1 - 1e-12)


@given(methods, shares, concurrencies)
def test_the_break_even_length_is_where_nothing_is_gained(
    method: str, rates: list[float], concurrency: int
) -> None:
    found = predict(roofline(), method, profile_of_rates(rates), k=len(rates),
                    concurrency=concurrency, context=512)  # fmt: skip
    assert found.gain == pytest.approx(found.acceptance_length / found.break_even_length)
    assert (found.gain > 1) == (found.acceptance_length > found.break_even_length)


def test_free_perfect_drafts_gain_k_plus_one_while_memory_is_the_limit() -> None:
    perfect = profile_of_rates([1.0] * 7)
    found = predict(roofline(), "ngram", perfect, k=7, concurrency=1, context=1)
    assert found.gain == pytest.approx(8, rel=0.001)
    crowd = predict(roofline(), "ngram", perfect, k=7, concurrency=1000, context=1)
    assert crowd.gain == pytest.approx(1, rel=0.01)  # products are: eight rows cost eight


def test_eagle3_pays_for_each_draft_and_p_eagle_once() -> None:
    assumed = replace(IDEAL, kernel_overhead=1e-6)
    eagle3 = [roofline(assumed=assumed).draft("eagle3", k, 1, 1) for k in (1, 2, 4)]
    assert eagle3[2] - eagle3[1] == pytest.approx(2 * (eagle3[1] - eagle3[0]), rel=1e-6)
    parallel = [roofline(assumed=assumed).draft("p-eagle", k, 1, 1) for k in (1, 7)]
    assert parallel[1] == pytest.approx(parallel[0], rel=1e-6)


def test_passes_of_the_drafters_are_counted_kernel_by_kernel() -> None:
    endless = Gpu("endless", bandwidth=1e40, flops=1e40, memory_bytes=1e40)
    costs = roofline(endless, replace(IDEAL, kernel_overhead=1.0))
    # A layer has 5 large and 4 small kernels; beside them logits, aux hidden states
    # and the wider first layer.
    assert costs.draft("eagle3", 5, 1, 1) == pytest.approx(5 * (9 + 3))
    assert costs.draft("p-eagle", 5, 1, 1) == pytest.approx(4 * 9 + 3)
    assert costs.draft("ngram", 5, 1, 1) == 0


def test_p_eagle_computes_two_k_rows_and_k_logits() -> None:
    costs, drafter = roofline(replace(GPU, bandwidth=1e30)), drafter_shape("p-eagle", LLAMA_8B)
    assert drafter is not None
    layer, h = drafter.decoder.layer_products(), LLAMA_8B.hidden_size
    weights = (
        4 * sum(layer) + layer[0] + 3 * h * h
    )  # the first q, k, v twice; three aux_hidden_states
    products = 2 * (10 * weights + 5 * h * LLAMA_8B.vocab_size)
    assert costs.draft("p-eagle", 5, 1, 0) == pytest.approx(products / GPU.flops)


def test_attention_multiplies_each_row_with_its_context() -> None:
    costs = roofline(replace(GPU, bandwidth=1e30))
    longer = costs.verify(3, 2, 5000) - costs.verify(3, 2, 0)
    # 4 rows of 2 requests, 32 layers of 32 heads of 128, scores and values, multiply and add
    assert longer == pytest.approx(4 * 2 * 5000 * 32 * 32 * 128 * 4 / GPU.flops)


def test_the_best_is_none_where_nothing_gains() -> None:
    grid = predict_grid(roofline(), {"p-eagle": profile_of_rates([0.5, 0.2])},
                        ks=[1, 2], concurrencies=[1, 2000], context=1)  # fmt: skip
    best = best_by_concurrency(grid)
    assert best[1] is not None
    assert best[1].otps == max(p.otps for p in grid if p.concurrency == 1)
    assert best[2000] is None


def test_a_target_too_large_for_the_gpu_is_seen() -> None:
    assert roofline().fits(1, 1024)
    assert not roofline(replace(GPU, memory_bytes=10e9)).fits(1, 1024)
    assert not roofline().fits(1000, 100_000)


def test_every_preset_can_be_used_and_faster_memory_is_faster() -> None:
    for name in gpu_table():
        assert find_gpu(name, "bfloat16").bandwidth > 1e11
    order = ["l4", "a100", "h100", "h200", "b200"]
    speeds = [1 / roofline(find_gpu(name, "bfloat16")).plain(1, 1024) for name in order]
    assert speeds == sorted(speeds)
    with pytest.raises(ConfigError, match="h900"):
        find_gpu("h900", "bfloat16")
    with pytest.raises(ConfigError, match="float8"):
        find_gpu("a100", "float8")


def test_a_mixture_of_experts_and_broken_sizes_are_refused() -> None:
    with pytest.raises(ModelError, match="mixture"):
        decoder_shape({"num_local_experts": 8}, "config.json")
    with pytest.raises(ModelError, match="sizes"):
        decoder_shape({"hidden_size": 8}, "config.json")


def test_profiles_are_read_from_rates_results_and_the_heads_file(tmp_path: Path) -> None:
    assert read_profiles("0.5,0.25", ["p-eagle"])["p-eagle"].length(2) == 1.75
    save_results(modelled_grid(), tmp_path)
    assert read_profiles(str(tmp_path), [])["p-eagle"].length(1) == pytest.approx(1.79, abs=0.03)
    heads = Path(__file__).parents[3] / "benchmarks/results/heads_h200.json"
    published = read_profiles(str(heads), [])
    assert set(published) == {"p-eagle", "eagle3"}
    assert published["p-eagle"].length(5) == 3.1628


def test_steps_without_drafts_yield_one_token() -> None:
    stats = {"num_steps": 100, "num_drafts": 20, "num_accepted_tokens": 30}
    cell = make_cell("ngram", 3, [100.0], stats={**stats, "mean_acceptance_length": 2.5})
    assert profiles_of(make_results([cell]))["ngram"].length(3) == 1.3


def test_between_measured_k_the_line_is_taken_and_beyond_them_nothing() -> None:
    profile = Profile({3: 2.5, 7: 3.5})
    assert profile.length(5) == 3.0
    assert profile.length(1) == 1.5  # half a token for each of three
    with pytest.raises(ConfigError, match="K = 8"):
        profile.length(8)


@pytest.mark.parametrize(
    "text", ["", "no-such-file", "0.5,1.2", "0.5,0.6", "-0.1"], ids=lambda t: t or "empty"
)
def test_impossible_profiles_are_refused(text: str) -> None:
    with pytest.raises((ConfigError, DataError)):
        read_profiles(text, ["p-eagle"])
    with pytest.raises(ConfigError, match="impossible"):
        Profile({2: 3.5})


TABLE: dict[str, Any] = {
    "step_costs": [
        {"part": "plain", "concurrency": 1, "seconds": 0.010},
        {"part": "plain", "concurrency": 5, "seconds": 0.014},
        *(
            {
                "part": part,
                "method": "p-eagle",
                "k": k,
                "concurrency": n,
                "seconds": seconds + n / 1e3,
            }
            for part, seconds in (("verify", 0.011), ("draft", 0.002))
            for k in (3, 5)
            for n in (1, 5)
        ),
    ]
}


def test_measured_steps_are_read_between_their_points() -> None:
    costs = measured_costs(TABLE, "table.json")
    assert costs.plain(3, 99) == pytest.approx(0.012)
    assert costs.speculative("p-eagle", 4, 3, 99) == pytest.approx(0.011 + 0.002 + 2 * 0.003)
    for k, concurrency in ((9, 1), (3, 9)):
        with pytest.raises(ConfigError, match=f"K = {k}, concurrency {concurrency}"):
            costs.speculative("p-eagle", k, concurrency, 99)
    with pytest.raises(ConfigError, match="eagle3"):
        costs.speculative("eagle3", 3, 1, 99)


@pytest.mark.parametrize(
    "row",
    [{}, {"part": "plain", "concurrency": 1, "seconds": -1.0},
     {"part": "lunch", "concurrency": 1, "seconds": 1.0},
     {"part": "plain", "concurrency": 1, "seconds": 1.0, "weather": 1}],
)  # fmt: skip
def test_a_broken_table_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="step_costs"):
        measured_costs({"step_costs": [row]}, "table.json")
    with pytest.raises(DataError):
        measured_costs([], "table.json")


def test_predictions_from_a_cells_own_steps_agree_with_its_speed() -> None:
    validation = validate(modelled_grid())
    assert validation.own.num_cells == len(modelled_grid().cells)
    assert validation.own.worst < 0.01  # the scatter of the made-up repeats, and rounding
    assert validation.left_out is not None
    assert validation.own.median < validation.left_out.median < validation.left_out.worst < 0.25


def test_a_cell_that_lies_about_its_speed_is_seen() -> None:
    grid = modelled_grid()
    liar = grid.cells[0]
    wrong = replace(liar, repeats=[replace(run, otps=run.otps * 2) for run in liar.repeats])
    validation = validate(replace(grid, cells=[wrong, *grid.cells[1:]]))
    assert validation.own.worst == pytest.approx(0.5, abs=0.01)


def test_a_left_out_cell_does_not_predict_itself() -> None:
    grid = modelled_grid(workloads=("chat",), methods=("p-eagle",))
    place = next(n for n, c in enumerate(grid.cells)
                 if (c.num_speculative_tokens, c.concurrency) == (5, 4))  # fmt: skip
    cell = grid.cells[place]
    stats = [{**run.stats, "verify_time": 9.0, "num_accepted_tokens": 0}
             for run in cell.repeats]  # fmt: skip
    runs = [replace(run, stats=s) for run, s in zip(cell.repeats, stats, strict=True)]
    odd = [replace(c, repeats=runs) if n == place else c for n, c in enumerate(grid.cells)]
    before, after = validate(grid).cells[place], validate(replace(grid, cells=odd)).cells[place]
    assert before.left_out is not None
    assert before.left_out == after.left_out
    assert before.own != after.own


def test_results_without_step_times_cannot_be_validated() -> None:
    with pytest.raises(DataError, match="step times"):
        validate(make_results([make_cell()]))


def test_measured_steps_of_a_bench_predict_its_gain() -> None:
    grid = modelled_grid(workloads=("chat",))
    costs, profiles = measured_table(grid), profiles_of(grid)
    found = predict(costs, "p-eagle", profiles["p-eagle"], k=5, concurrency=4, context=0)
    cells = {(c.method, c.num_speculative_tokens, c.concurrency): c for c in grid.cells}
    speeds = [cells[key].summary() for key in (("p-eagle", 5, 4), ("none", 0, 4))]
    assert speeds[0] is not None
    assert speeds[1] is not None
    assert found.gain == pytest.approx(speeds[0].otps.value / speeds[1].otps.value, rel=0.01)


def tree_step(part: str, k: int, nodes: int | None, load: int, seconds: float) -> dict[str, Any]:
    return {"part": part, "method": "p-eagle", "k": k, "nodes": nodes, "concurrency": load,
            "seconds": seconds}  # fmt: skip


def test_a_tree_costs_the_verification_of_its_rows_and_the_draft_of_its_depth() -> None:
    plain = [{"part": "plain", "concurrency": n, "seconds": 0.010} for n in (1, 4)]
    chains = [tree_step(part, k, None, n, 0.010 + 0.001 * k)
              for part in ("verify", "draft") for k in (3, 7) for n in (1, 4)]  # fmt: skip
    of_chains = measured_costs({"step_costs": plain + chains}, "table.json")
    # Five drafts lie between three and seven; the draft is that of a chain of 7.
    assert of_chains.speculative("p-eagle", 7, 1, 0, 5) == pytest.approx(0.015 + 0.017)
    with pytest.raises(ConfigError, match="K = 7, N = 15, concurrency 1"):
        of_chains.speculative("p-eagle", 7, 1, 0, 15)
    trees = [tree_step("verify", 7, n, load, 0.018 + 0.001 * n)
             for n in (7, 15) for load in (1, 4)]  # fmt: skip
    trees += [tree_step("draft", 7, 15, load, 0.020) for load in (1, 4)]
    both = measured_costs({"step_costs": plain + chains + trees}, "table.json")
    assert both.speculative("p-eagle", 7, 4, 0, 15) == pytest.approx(0.033 + 0.020)
    assert both.speculative("p-eagle", 7, 4, 0, 11) == pytest.approx(0.029 + 0.020)
    # Of as many rows a tree's own steps tell more than a chain's, which stay what they were.
    assert both.speculative("p-eagle", 7, 4, 0, 7) == pytest.approx(0.025 + 0.020)
    assert both.speculative("p-eagle", 7, 4, 0) == pytest.approx(0.017 + 0.017)


def test_computed_trees_cost_more_rows_and_no_more_passes() -> None:
    costs = roofline()
    chain = costs.speculative("p-eagle", 7, 32, 1024)
    assert costs.speculative("p-eagle", 7, 32, 1024, 7) == chain
    assert costs.speculative("p-eagle", 7, 32, 1024, 31) - chain == pytest.approx(
        costs.verify(31, 32, 1024) - costs.verify(7, 32, 1024)
    )


TREES = Profile({7: 4.0}, {7: {1: 1.8, 3: 2.8, 7: 4.2, 15: 5.0, 31: 5.6}})


def test_auto_is_the_fastest_number_of_nodes_or_none() -> None:
    loads = (1, 8, 64, 512)
    grid = predict_grid(roofline(), {"p-eagle": TREES}, ks=[7], nodes=[1, 3, 7, 15, 31],
                        concurrencies=loads, context=1024)  # fmt: skip
    chosen = []
    for load in loads:
        here = [p for p in grid if p.concurrency == load]
        auto = next(p for p in here if p.is_auto)
        fixed = [p.otps for p in here if not p.is_auto and p.num_draft_nodes is not None]
        assert auto.otps == max([*fixed, auto.plain_otps])
        chosen.append(auto.num_draft_nodes)
    assert chosen == sorted(chosen, reverse=True)  # the more requests, the fewer nodes pay
    assert chosen[0] == 31
    assert chosen[-1] < 7
    useless = Profile({}, {7: {1: 1.0, 31: 1.0}})
    off = predict_auto(roofline(), "p-eagle", useless, k=7, concurrency=8, context=1)
    assert (off.num_draft_nodes, off.gain, off.acceptance_length) == (0, 1.0, 1.0)


def test_trees_are_read_from_evaluations_and_from_bench(tmp_path: Path) -> None:
    evaluated = {
        "method": "p-eagle",
        "num_speculative_tokens": 3,
        "acceptance": {"greedy": {"all": {"acceptance_length": [1.5, 2.0, 2.2]}}},
        "trees": {"all": {"acceptance_length": [1.5, 2.0, 2.3, 2.5]}},
    }
    path = tmp_path / "evaluated.json"
    path.write_text(json.dumps(evaluated))
    found = read_profiles(str(path), [])["p-eagle"]
    assert (found.length(3), found.length(3, 4)) == (2.2, 2.5)
    with pytest.raises(ConfigError, match="K = 3, N = 5 is not known"):
        found.length(3, 5)
    chain = modelled_cell("p-eagle", 5, "chat", 4)
    tree = replace(modelled_cell("p-eagle", 7, "chat", 4), num_draft_nodes=15)
    auto = replace(modelled_cell("p-eagle", 1, "chat", 4), is_auto=True)
    profile = profiles_of(make_results([chain, tree, auto]))["p-eagle"]
    assert (set(profile.lengths), {k: set(line) for k, line in profile.trees.items()}) == (
        {5},
        {7: {15}},
    )


def test_impossible_trees_are_refused() -> None:
    with pytest.raises(ConfigError, match="K = 7, N = 2 is impossible"):
        Profile({}, {7: {2: 3.5}})
    with pytest.raises(ConfigError, match="acceptance of trees is not known"):
        predict_grid(roofline(), {"p-eagle": Profile({1: 1.5})}, ks=[1], nodes=[3],
                     concurrencies=[1], context=1)  # fmt: skip


def test_trees_of_a_bench_are_validated_beside_its_chains() -> None:
    grid = modelled_grid(workloads=("chat",), methods=("p-eagle",))
    trees = [
        replace(cell, num_speculative_tokens=9, num_draft_nodes=cell.num_speculative_tokens)
        for cell in grid.cells
        if cell.num_speculative_tokens
    ]
    auto = replace(trees[0], is_auto=True)
    validation = validate(replace(grid, cells=[*grid.cells, *trees, auto]))
    assert validation.own.num_cells == len(grid.cells) + len(trees)
    assert validation.own.worst < 0.01
    own = {c.setting.num_draft_nodes: c.left_out for c in validation.cells if c.concurrency == 4}
    assert own[5] is not None  # between trees of 3 and of 7 nodes
