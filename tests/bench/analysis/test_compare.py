"""Two results side by side: verdicts by interval, regressions beyond noise, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from peagle.bench.analysis.compare import compare
from peagle.bench.results.document import Cell
from peagle.errors import ConfigError

from ..made import HEAD, make_cell, make_results, modelled_grid

OLD = (100.0, 101.0, 99.0)


def pair(old: Any, new: Any, **options: Any) -> Any:
    return compare(make_results([make_cell(speeds=old)]), make_results([make_cell(speeds=new)]),
                   **options)  # fmt: skip


@pytest.mark.parametrize(
    ("new", "verdict", "code"),
    [
        ((120.0, 121.0, 119.0), "faster", 0),
        ((100.5, 99.5, 100.2), "same", 0),
        ((80.0, 81.0, 79.0), "slower", 1),
        ((70.0, 130.0, 90.0), "same", 0),  # slower on average, but all noise
        ((98.9, 99.0, 98.8), "slower", 0),  # surely slower, within the tolerance
    ],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(
    new: tuple[float, ...], verdict: str, code: int
) -> None:
    old = (100.0, 100.1, 99.9) if verdict == "slower" else OLD
    found = pair(old, new)
    assert found.cells[0].verdict == verdict
    assert found.exit_code == code


def test_the_tolerance_moves_the_line() -> None:
    new = (95.0, 95.1, 94.9)
    assert pair((100.0, 100.1, 99.9), new, tolerance=0.02).exit_code == 1
    assert pair((100.0, 100.1, 99.9), new, tolerance=0.10).exit_code == 0


@pytest.mark.parametrize(("old", "new"), [([100.0], [50.0]), ((43.9, 39.0), (28.4, 28.2))])
def test_one_or_two_repeats_are_no_regression_because_their_noise_is_unknown(
    old: list[float], new: list[float]
) -> None:
    found = pair(old, new)
    assert found.cells[0].verdict == "unknown"
    assert found.exit_code == 0


def with_length(cell: Cell, length: float) -> Cell:
    stats = {"num_drafts": 100, "mean_acceptance_length": length}
    return replace(cell, repeats=[replace(run, stats=stats) for run in cell.repeats])


@pytest.mark.parametrize("speeds", [OLD, (100.0,)])
def test_fewer_accepted_tokens_are_a_regression_at_the_same_speed(
    speeds: tuple[float, ...],
) -> None:
    cell = make_cell("p-eagle", 5, speeds)
    old, new = make_results([with_length(cell, 3.0)]), make_results([with_length(cell, 2.5)])
    found = compare(old, new)
    assert found.cells[0].fewer_accepted
    assert not found.cells[0].slower
    assert found.exit_code == 1
    assert compare(new, old).exit_code == 0


def test_one_sampled_repeat_says_nothing_of_acceptance() -> None:
    cell = make_cell("p-eagle", 5, [100.0])
    old, new = (make_results([with_length(cell, n)]) for n in (3.0, 2.5))
    sampled = [replace(r, manifest=replace(r.manifest, temperature=1.0)) for r in (old, new)]
    assert compare(*sampled).exit_code == 0


def test_cells_in_one_file_only_are_named() -> None:
    shared = make_cell()
    found = compare(
        make_results([shared, make_cell("ngram", 3)]),
        make_results([shared, make_cell("eagle3", 5)]),
    )
    assert found.only_a == ("ngram K=3, chat at 1",)
    assert found.only_b == ("eagle3 (smollm2-135m-eagle3) K=5, chat at 1",)


def test_a_head_in_another_folder_is_the_same_head() -> None:
    here, there = make_cell("p-eagle", 5), replace(make_cell("p-eagle", 5), head=f"/x/{HEAD}/")
    assert len(compare(make_results([here]), make_results([there])).cells) == 1


def test_different_models_or_prompts_are_refused_unless_forced() -> None:
    a = make_results([make_cell()])
    other = replace(a, manifest=replace(a.manifest, model="another"))
    prompts = [replace(w, sha256="00") for w in a.manifest.workloads]
    reworded = replace(a, manifest=replace(a.manifest, workloads=prompts))
    longer = replace(a, manifest=replace(a.manifest, max_tokens=999))
    for b, words in (
        (other, "models"),
        (reworded, "other prompts in chat"),
        (longer, "max_tokens"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            compare(a, b)
        assert "--force" in str(caught.value.hint)
        assert any(words in warning for warning in compare(a, b, force=True).warnings)


def test_other_hardware_is_remarked_and_not_refused() -> None:
    a = make_results([make_cell()])
    elsewhere = {**a.manifest.provenance, "hardware": {"cpu": "B", "gpus": ["NVIDIA H200"]}}
    b = replace(a, manifest=replace(a.manifest, provenance=elsewhere), partial=True)
    assert compare(a, b).warnings == ("hardware: A CPU and NVIDIA H200", "B is partial")


def test_no_common_cell_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no cell in common"):
        compare(make_results([make_cell()]), make_results([make_cell(concurrency=2)]))


def test_a_result_equals_itself_and_can_be_written_as_json() -> None:
    grid = modelled_grid()
    found = compare(grid, grid)
    assert len(found.cells) == len(grid.cells)
    assert {cell.verdict for cell in found.cells} == {"same"}
    assert json.loads(json.dumps(found.to_json()))["num_regressions"] == 0


def test_what_it_cannot_see_is_said() -> None:
    (words,) = pair([100.0], [50.0]).warnings
    assert words.startswith("1 repeat of a cell")
    (words,) = pair([100.0, 101.0], [50.0, 51.0]).warnings
    assert words.startswith("2 repeats of a cell")
    rated = make_results([replace(make_cell(), concurrency=None, request_rate=2.5)])
    (words,) = compare(rated, rated).warnings
    assert "latencies are not compared" in words
    assert not pair(OLD, OLD).warnings
