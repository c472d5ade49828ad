"""`peagle simulate`: computed and measured step times, and the validation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from peagle.bench.results.document import save_results
from peagle.cli.main import main
from tests.bench.made import make_cell, make_results, modelled_grid

from .fakes import Shell

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIZES))
    return str(file)


def test_a_shape_and_a_gpu_give_a_table(shell: Shell, config: str) -> None:
    rates = ("--acceptance", "0.7,0.5,0.3", "--spec-tokens", "1,3")
    assert shell("simulate", "--model", config, "--gpu", "L4", *rates) == 0
    assert "computed, not measured, for NVIDIA L4" in shell.out
    assert "assumed: 73% of peak bandwidth for weights" in shell.out
    assert "best at concurrency 1: p-eagle K=3" in shell.out
    assert "break-even" in shell.out


def test_a_model_folder_is_read_by_its_config_alone(shell: Shell, config: str) -> None:
    where = ("--model", str(Path(config).parent), "--gpu", "h200", "--method", "p-eagle,eagle3")
    assert shell("simulate", *where, "--acceptance", "0.7,0.5", "--spec-tokens", "2", "--json") == 0
    assert {p["method"] for p in shell.json["predictions"]} == {"p-eagle", "eagle3"}
    alone = shell.json["predictions"][0]
    assert alone["acceptance_length"] == pytest.approx(2.2)
    assert alone["gain"] == pytest.approx(alone["otps"] / alone["plain_otps"])
    assert shell.json["best"]["1"]["num_speculative_tokens"] == 2


def test_a_larger_overhead_makes_speculation_gain_more(shell: Shell, config: str) -> None:
    gains = []
    for overhead in ("0", "0.01"):
        flags = ("--model", config, "--gpu", "h100", "--step-overhead", overhead, "--json")
        assert shell("simulate", *flags, "--acceptance", "0.7", "--spec-tokens", "1") == 0
        gains.append(shell.json["predictions"][0]["gain"])
    assert gains[1] > gains[0]


def test_a_cache_that_does_not_fit_is_remarked(shell: Shell, config: str) -> None:
    flags = ("--model", config, "--gpu", "l4", "--acceptance", "0.7", "--spec-tokens", "1")
    assert shell("simulate", *flags, "--concurrency", "1,512", "--context", "8192") == 0
    assert "does not fit the GPU's memory at context 8192: concurrency 512" in shell.out


def test_bench_results_are_step_times_and_acceptance_at_once(shell: Shell, tmp_path: Path) -> None:
    save_results(modelled_grid(), tmp_path)
    same = ("--costs", str(tmp_path), "--acceptance", str(tmp_path))
    grid = ("--spec-tokens", "3,4", "--concurrency", "1,8")
    assert shell("simulate", *same, *grid, "--json") == 0
    assert len(shell.json["predictions"]) == 3 * 2 * 2
    assert "measured" in shell.json["notes"][0]


def test_without_a_grid_all_that_is_known_is_predicted(
    shell: Shell, config: str, tmp_path: Path
) -> None:
    computed = ("--model", config, "--gpu", "h200", "--acceptance", "0.7,0.5,0.3", "--json")
    assert shell("simulate", *computed) == 0
    asked = {(p["num_speculative_tokens"], p["concurrency"]) for p in shell.json["predictions"]}
    assert asked == {(k, c) for k in (1, 2, 3) for c in (1, 4, 16, 64)}
    save_results(modelled_grid(loads=(1, 2), ks=(2, 3)), tmp_path)
    measured = ("--costs", str(tmp_path), "--acceptance", str(tmp_path), "--json")
    assert shell("simulate", *measured) == 0
    asked = {(p["num_speculative_tokens"], p["concurrency"]) for p in shell.json["predictions"]}
    assert asked == {(2, 1), (2, 2), (3, 1), (3, 2)}
    assert shell("simulate", "--validate", str(tmp_path)) == 0
    assert "from neighbours alone: not known" in shell.out


def test_trees_and_what_the_engine_would_choose_stand_beside_chains(
    shell: Shell, tmp_path: Path
) -> None:
    grid = modelled_grid(workloads=("chat",), loads=(1, 4), methods=("p-eagle",))
    trees = [replace(cell, num_speculative_tokens=7, num_draft_nodes=cell.num_speculative_tokens)
             for cell in grid.cells if cell.num_speculative_tokens]  # fmt: skip
    save_results(replace(grid, cells=[*grid.cells, *trees]), tmp_path)
    same = ("--costs", str(tmp_path), "--acceptance", str(tmp_path))
    assert shell("simulate", *same, "--json") == 0
    found = [(p["num_draft_nodes"], p["is_auto"]) for p in shell.json["predictions"]]
    assert {n for n, is_auto in found if not is_auto} == {None, 1, 3, 5, 7}
    assert sum(is_auto for _, is_auto in found) == 2  # one for each load
    assert shell("simulate", *same, "--spec-nodes", "4", "--spec-tokens", "5") == 0
    assert "p-eagle auto, 4" in shell.out
    assert shell("simulate", *same, "--spec-nodes", "9") == 2
    assert "K = 7, N = 9" in shell.err
    assert shell("simulate", *same[:2], "--acceptance", "0.7", "--spec-nodes", "3") == 2
    assert "the acceptance of trees is not known" in shell.err


def test_the_validation_states_its_error(shell: Shell, tmp_path: Path) -> None:
    save_results(modelled_grid(), tmp_path)
    assert shell("simulate", "--validate", str(tmp_path)) == 0
    assert "own step times and acceptance: median error" in shell.out
    assert "from neighbours alone: median error" in shell.out
    assert shell("simulate", "--validate", str(tmp_path), "--json") == 0
    assert shell.json["own"]["worst"] < 0.01


def test_a_users_error_is_one_line(shell: Shell, config: str, tmp_path: Path) -> None:
    save_results(make_results([make_cell()]), tmp_path / "bare")
    (tmp_path / "list.json").write_text("[]")
    model, rates = ("--model", config, "--gpu", "h200"), ("--acceptance", "0.7,0.5")
    for arguments, message in (
        (model, "the acceptance is not known"),
        (rates, "step costs are not known"),
        ((*model, *rates, "--spec-tokens", "3"), "acceptance at K = 3 is not known"),
        ((*model, *rates, "--spec-tokens", "x"), "not a list of whole numbers"),
        ((*model, *rates, "--spec-tokens", "0"), "not a list of whole numbers"),
        ((*model, *rates, "--context", "0"), "out of range"),
        ((*model, *rates, "--bandwidth-share", "2"), "is out of range"),
        ((*model, *rates, "--step-overhead", "-1"), "--step-overhead -1.0 is out of range"),
        ((*model, *rates, "--draft-layers", "0"), "--draft-layers 0 is out of range"),
        ((*model, *rates, "--draft-vocab", "-1"), "--draft-vocab -1 is out of range"),
        ((*model, "--acceptance", "0.1,0.2"), "rises"),
        ((*model, "--acceptance", "1.5,2"), "is out of range"),
        ((*model, "--acceptance", str(tmp_path / "list.json")), "holds no acceptance figures"),
        ((*model, "--acceptance", str(tmp_path)), "cannot read acceptance from"),
        ((*model, *rates, "--spec-tokens", "1", "--method", "magic"), "has no known sizes"),
        (("--model", config, "--gpu", "h900", *rates), "is not known"),
        (("--model", str(tmp_path / "no"), "--gpu", "h200", *rates), "cannot read"),
        (("--costs", str(tmp_path / "list.json"), *rates), "is not a JSON object"),
        (("--costs", str(tmp_path / "bare"), *rates), "no cell has step times"),
        (("--validate", str(tmp_path / "bare")), "no cell has step times"),
    ):
        assert shell("simulate", *arguments) == 2, arguments
        assert message in shell.err
        assert shell.err.count("error:") == 1
        assert shell.err.count("hint:") == 1, arguments
        assert "[Errno" not in shell.err


def test_help_lists_the_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    assert "--kernel-overhead" in capsys.readouterr().out


def test_measured_costs_say_which_k_are_predicted_unless_told(shell: Shell) -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    costs, heads = results / "step_costs_8b_h200.json", results / "heads_h200.json"
    assert shell("simulate", "--costs", str(costs), "--acceptance", str(heads), "--json") == 0
    found = {p["num_speculative_tokens"] for p in shell.json["predictions"]}
    assert found == {3, 5, 7}  # 11 was measured, too, but the heads' acceptance ends at 8
