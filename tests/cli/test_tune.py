"""`peagle tune`: a table, costs, and the flags to use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from peagle.bench.results.document import save_results
from peagle.cli.main import main
from tests.bench.made import HEAD, make_cell, make_lossless, make_results, modelled_grid

from .fakes import Shell


@pytest.fixture
def grid(tmp_path: Path) -> str:
    return str(save_results(modelled_grid(loads=(1, 16, 512)), tmp_path))


def test_the_table_names_what_to_run_and_the_flags(shell: Shell, grid: str) -> None:
    assert shell("tune", grid) == 0
    assert "none (off)" in shell.out
    assert "off at load 512" in shell.out
    line = next(x for x in shell.out.splitlines() if x.startswith("vLLM:"))
    config = json.loads(line.partition("'")[2].rstrip("'"))
    assert config["method"] == "eagle3"
    assert config["parallel_drafting"] is True
    assert config["model"] == HEAD
    assert "peagle export" in shell.out
    assert "tokens per $" not in shell.out


def test_a_folder_is_as_good_as_its_file(shell: Shell, grid: str) -> None:
    assert shell("tune", str(Path(grid).parent), "--json") == 0
    assert shell.json["overall"]["speculative_config"]["method"] == "p-eagle"


def test_json_has_gain_interval_cost_and_configs(shell: Shell, grid: str) -> None:
    price = ("--gpu-dollars-per-hour", "3.6", "--tokens-per-second", "5000", "--gpus", "2")
    assert shell("tune", grid, *price, "--json") == 0
    first, *_, last = shell.json["by_load"]
    assert (first["load"], first["off"], last["load"], last["off"]) == ("1", False, "512", True)
    assert first["gain"]["low"] <= first["gain"]["value"] <= first["gain"]["high"]
    assert first["cost"]["tokens_per_dollar"] == pytest.approx(first["otps"]["value"] * 500)
    wanted = -(-5000 // first["otps"]["value"]) * 2
    assert first["cost"]["gpus_for_wanted_rate"] == wanted
    assert first["cost_of_none"]["gpus_for_wanted_rate"] > wanted
    assert last["speculative_config"] is None
    assert len(shell.json["by_workload"]) == 6


def test_costs_are_shown_when_a_price_is_given(shell: Shell, grid: str) -> None:
    assert shell("tune", grid, "--gpu-dollars-per-hour", "2") == 0
    assert "tokens per $" in shell.out


def test_nothing_to_gain_means_no_flags(shell: Shell, tmp_path: Path) -> None:
    cells = [make_cell(), make_cell("ngram", 3, (50.0, 51.0, 49.0))]
    save_results(make_results(cells, partial=True, lossless=make_lossless(2)), tmp_path)
    assert shell("tune", str(tmp_path)) == 0
    assert "leave out --speculative-config" in shell.out
    assert "partial" in shell.out
    assert "note: Same output up to rounding" in shell.out
    assert "vLLM:" not in shell.out


def test_where_it_is_off_the_fastest_is_among_those_as_good(shell: Shell, tmp_path: Path) -> None:
    cells = [make_cell(), make_cell("p-eagle", 5, (140.0, 90.0, 110.0)),
             make_cell("p-eagle", 3, (101.0, 99.0, 100.0))]  # fmt: skip
    save_results(make_results(cells), tmp_path)
    assert shell("tune", str(tmp_path), "--json") == 0
    found = shell.json["by_load"][0]
    assert found["off"]
    assert "the fastest, p-eagle K=5, gains" in found["why"]
    assert [s["num_speculative_tokens"] for s in found["as_good_within_noise"]] == [5, 3]


def test_figures_of_one_output_have_one_format(shell: Shell, tmp_path: Path) -> None:
    cells = [make_cell(speeds=(73_000.4, 73_100.0, 72_900.0)),
             make_cell("p-eagle", 5, (138_762.3, 138_800.0, 138_700.0))]  # fmt: skip
    save_results(make_results(cells), tmp_path)
    assert shell("tune", str(tmp_path), "--gpu-dollars-per-hour", "3") == 0
    assert "138,800 ± 200" in shell.out
    assert "167,000,000" in shell.out
    assert "0.00601" in shell.out
    assert "0.0114" in shell.out


def test_a_tree_is_advised_for_peagle_and_vllm_is_said_to_draft_none(
    shell: Shell, tmp_path: Path
) -> None:
    tree = replace(make_cell("p-eagle", 5, (300.0, 301.0, 299.0)), num_draft_nodes=15)
    save_results(make_results([make_cell(), tree]), tmp_path)
    assert shell("tune", str(tmp_path)) == 0
    assert "overall: p-eagle N=15 K=5" in shell.out
    assert "note: N is the number of nodes in a tree of drafts" in shell.out
    assert '"num_draft_nodes": 15' in shell.out
    assert "vLLM:   does not draft trees" in shell.out
    assert "null" not in shell.out


def test_a_users_error_is_one_line(shell: Shell, tmp_path: Path, grid: str) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "results.json").write_text("{")
    save_results(make_results([make_cell("p-eagle", 5)]), tmp_path / "alone")
    for arguments, message in (
        ((str(tmp_path / "missing"),), "no results"),
        ((str(tmp_path / "bad"),), "is not valid JSON"),
        ((str(tmp_path / "alone"),), "method none"),
        ((grid, "--gpu-dollars-per-hour", "0"), "out of range"),
        ((grid, "--gpus", "-1"), "out of range"),
    ):
        assert shell("tune", *arguments) == 2
        assert message in shell.err
        assert shell.err.count("error:") == 1


def test_help_needs_no_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--help"]) == 0
    assert "--gpu-dollars-per-hour" in capsys.readouterr().out


def test_auto_is_advised_by_its_name(shell: Shell, tmp_path: Path) -> None:
    results = modelled_grid(loads=(1,))
    for cell in [c for c in results.cells if c.method == "p-eagle"]:
        faster = [replace(run, otps=3 * run.otps) for run in cell.repeats]
        results.cells.append(replace(cell, repeats=faster, is_auto=True, num_speculative_tokens=7))
    path = str(save_results(results, tmp_path))
    assert shell("tune", path) == 0
    assert "p-eagle auto" in shell.out
    assert "measure again with --speculation fixed" in shell.out
    assert shell("tune", path, "--json") == 0
    config = shell.json["overall"]["speculative_config"]
    assert config == {"method": "p-eagle", "model": HEAD, "speculation": "auto"}
    assert shell.json["overall"]["vllm_speculative_config"] is None
