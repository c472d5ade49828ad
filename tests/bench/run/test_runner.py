"""A whole grid on the tiny model: what it leaves, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peagle.bench.results.document import Results, load_results
from peagle.bench.results.store import Store
from peagle.cli.engines import build_backend
from peagle.errors import BackendError, ConfigError, HeadError, OutputError, RequestError

from .grids import Watcher, run_grid
from .sse_server import Behaviour, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grid(
    model: str, head: str, prompts: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Results, Watcher, Path]:
    folder = tmp_path_factory.mktemp("grid")
    watcher = Watcher()
    keys = {"spec_model": head, "spec_method": "ngram,p-eagle", "spec_tokens": "2,4"}
    keys["spec_nodes"] = "9"
    results = run_grid(watcher, model=model, out=str(folder), workload=prompts, **keys)
    return results, watcher, folder


def test_every_cell_has_its_repeats_and_figures(grid: tuple[Results, Watcher, Path]) -> None:
    results, _, folder = grid
    assert len(results.cells) == (1 + 2 + 2 + 2 + 2) * 2
    assert load_results(folder) == results
    assert not results.partial
    for cell in results.cells:
        assert len(cell.repeats) == 2
        for run in cell.repeats:
            assert run.num_requests == 8  # four prompts of two turns
            assert run.num_output_tokens == sum(
                c.num_output_tokens for c in run.categories.values()
            )
            assert run.otps == pytest.approx(run.num_output_tokens / run.wall_s)
            assert run.latencies.ttft is not None
            assert run.peak_memory_bytes
            assert run.looping_share is not None
            assert run.stats["verify_time"] > 0
            assert cell.method != "none" or run.stats["num_drafts"] == 0
            if cell.method == "p-eagle":
                assert len(run.stats["per_position_acceptance"]) == cell.num_speculative_tokens
    drafts = {(c.num_speculative_tokens, c.num_draft_nodes) for c in results.cells if c.head}
    assert drafts == {(2, None), (4, None), (2, 9), (4, 9)}


def test_greedy_answers_of_all_methods_were_compared_and_agree(
    grid: tuple[Results, Watcher, Path],
) -> None:
    lossless = grid[0].lossless
    assert lossless is not None
    runs = len(grid[0].cells) * 2
    assert lossless.compared == 8 * (runs - 1)  # all but the reference itself
    assert (lossless.different, lossless.differences) == (0, [])


def test_method_that_changes_answers_is_found_with_the_gap_at_that_place(
    model: str, head: str, prompts: str, tmp_path: Path
) -> None:
    def build(name: str, engine: Any, drafter: Any, vllm: Any) -> Any:
        backend = build_backend(name, engine, drafter, vllm)
        if drafter is not None:
            own = backend.add_request
            favoured = {97: 3.0}
            backend.add_request = lambda prompt, params, **kw: own(  # type: ignore[method-assign]
                prompt, replace(params, logit_bias=favoured), **kw
            )
        return backend

    keys: dict[str, Any] = {"model": model, "spec_model": head, "workload": prompts}
    results = run_grid(build=build, out=str(tmp_path), concurrency="1", repeats=1, **keys)
    lossless = results.lossless
    assert lossless is not None
    assert 0 < lossless.different <= lossless.compared
    assert lossless.compared + lossless.not_comparable == 8
    first = lossless.differences[0]
    assert first.method == "p-eagle (p-eagle)"
    assert first.got == 97
    assert first.gap is not None
    assert 0 < first.gap <= 3.0  # the bias made up for it
    assert not [d for d in lossless.differences if d.got == d.expected]


def test_grid_interleaves_its_repeats(grid: tuple[Results, Watcher, Path]) -> None:
    repeats = [turn.repeat for turn in grid[1].done]
    assert repeats == [0] * 18 + [1] * 18


def test_one_tree_is_kept_of_each_method_that_drafts_trees(
    grid: tuple[Results, Watcher, Path],
) -> None:
    (tree,) = grid[0].trees
    assert (tree.method, tree.workload) == ("p-eagle N=9 (p-eagle)", grid[0].cells[0].workload)
    assert 1 <= len(tree.nodes) <= 9
    parents = [node.parent for node in tree.nodes]
    assert all(parent < number for number, parent in enumerate(parents, start=1))
    taken = [number for number, node in enumerate(tree.nodes, start=1) if node.accepted]
    assert [parents[number - 1] for number in taken] == [0, *taken][: len(taken)]
    assert taken or tree.bonus


def test_samples_show_one_depth_per_method(grid: tuple[Results, Watcher, Path]) -> None:
    results = grid[0]
    found = {(s.method, s.num_speculative_tokens) for s in results.samples}
    # Of the head's chains and trees the fastest is shown, whichever that was.
    assert {method.replace(" N=9", "") for method, _ in found} == {
        "none",
        "ngram",
        "p-eagle (p-eagle)",
    }
    assert len(found) == 3
    assert not any(t.drafted for s in results.samples if s.method == "none" for t in s.tokens)


def test_manifest_says_what_was_measured(grid: tuple[Results, Watcher, Path]) -> None:
    manifest = grid[0].manifest
    assert (manifest.dtype, manifest.device, manifest.backend) == ("float32", "cpu", "embedded")
    assert manifest.heads[0].method == "p-eagle"
    assert manifest.heads[0].sha256
    assert manifest.workloads[0].num_prompts == 4
    assert manifest.provenance["hardware"]["cpu"]


def test_finished_grid_is_not_run_again_and_a_larger_one_adds_to_it(
    model: str, prompts: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"model": model, "out": str(tmp_path), "workload": prompts}
    run_grid(concurrency="1", repeats=1, **keys)
    again = Watcher()
    run_grid(again, concurrency="1", repeats=1, **keys)
    assert (again.done, again.num_done_before) == ([], 1)
    more = Watcher()
    results = run_grid(more, concurrency="1", repeats=2, spec_method="ngram", **keys)
    assert len(more.done) == 3
    assert [len(c.repeats) for c in results.cells] == [2, 2]
    fewer = run_grid(concurrency="1", repeats=1, **keys)
    assert [c.method for c in fewer.cells] == ["none", "ngram"]  # nothing is lost


def test_grid_refuses_a_folder_that_was_measured_otherwise(
    model: str, prompts: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"model": model, "out": str(tmp_path), "repeats": 1, "concurrency": "1"}
    file = tmp_path / "p.jsonl"
    file.write_text(Path(prompts).read_text())
    run_grid(workload=str(file), **keys)
    with pytest.raises(ConfigError, match="max_tokens 8, not 9"):
        run_grid(workload=str(file), **keys | {"max_tokens": 9})
    with pytest.raises(ConfigError, match="raw False, not True"):
        run_grid(workload=str(file), raw=True, **keys)
    file.write_text('{"prompt": "another"}\n')
    with pytest.raises(ConfigError, match=r"workload .*p.jsonl has changed"):
        run_grid(workload=str(file), **keys)
    results = run_grid(workload=str(file), overwrite=True, **keys)
    assert results.manifest.workloads[0].num_prompts == 1


def test_ctrl_c_keeps_what_was_measured_and_the_next_call_goes_on(
    model: str, prompts: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"model": model, "out": str(tmp_path), "workload": prompts}
    with pytest.raises(KeyboardInterrupt):
        run_grid(Watcher(stop_after=3), **keys)
    kept = load_results(tmp_path)
    assert kept.partial
    assert sum(len(c.repeats) for c in kept.cells) == 3
    rest = Watcher()
    assert not run_grid(rest, **keys).partial
    assert (rest.num_done_before, len(rest.done)) == (3, 1)


class DyingBackend:
    """The real engine, until its step number `at`."""

    def __init__(self, real: Any, at: int, error: BaseException) -> None:
        self.real, self.left, self.error = real, at, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def step(self) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.real.step()


@pytest.mark.parametrize("error", [BackendError("vLLM died"), KeyboardInterrupt()])
def test_run_that_is_cut_short_is_kept_as_partial_and_made_again(
    error: BaseException, model: str, prompts: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"model": model, "out": str(tmp_path), "workload": prompts}
    keys |= {"concurrency": "1", "repeats": 1, "warmup": 0}
    with pytest.raises(type(error)) as caught:
        run_grid(build=lambda *a: DyingBackend(build_backend(*a), 20, error), **keys)
    if isinstance(error, BackendError):
        assert f"vLLM died; what was measured is kept in {tmp_path}" in str(caught.value)
    kept = load_results(tmp_path)
    (run,) = kept.cells[0].repeats
    assert kept.partial
    assert run.partial
    assert 0 < run.num_requests < 8
    assert run.errors
    whole = run_grid(**keys)
    assert [run.partial for run in whole.cells[0].repeats] == [False]


def test_killed_grid_goes_on_where_it_was(
    model: str, head: str, prompts: str, tmp_path: Path
) -> None:
    command = [
        *(sys.executable, "-c", "from peagle.__main__ import run; run()", "bench", model),
        *("--spec-model", head, "--spec-tokens", "1,2", "--concurrency", "1,2", "--repeats", "9"),
        *("--max-tokens", "8", "--workload", prompts, "--device", "cpu", "--out", str(tmp_path)),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ})
    limit = time.monotonic() + 120
    while len(list((tmp_path / "runs").glob("*.json"))) < 3 and time.monotonic() < limit:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path.name: path.read_text() for path in (tmp_path / "runs").glob("*.json")}
    assert 3 <= len(before) < 54
    assert load_results(tmp_path).partial
    rest = Watcher()
    keys: dict[str, Any] = {"model": model, "out": str(tmp_path), "workload": prompts}
    keys |= {"spec_model": head}
    keys |= {"warmup": None, "answers_per_stream": 3}  # the defaults, as in the command
    results = run_grid(rest, spec_tokens="1,2", repeats=1, **keys)
    assert len(rest.done) + rest.num_done_before == 6
    assert rest.num_done_before >= min(3, len(before))
    for name, content in before.items():
        assert (tmp_path / "runs" / name).read_text() == content
    assert results.lossless is not None
    assert results.lossless.different == 0


def test_head_for_another_model_is_refused_before_anything_runs(
    model: str, head: str, prompts: str, tmp_path: Path
) -> None:
    config = json.loads((Path(head) / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | {"target_num_hidden_layers": 30}))
    with pytest.raises(HeadError, match="this head was made for"):
        run_grid(model=model, spec_model=str(other), workload=prompts, out=str(tmp_path / "o"))
    assert not (tmp_path / "o").exists()


def test_out_that_cannot_be_written_is_one_line(model: str, prompts: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write to"):
        run_grid(model=model, workload=prompts, out=str(tmp_path / "file" / "out"))


@pytest.mark.skipif(sys.platform != "linux", reason="a folder where nobody can write")
def test_out_on_a_file_system_without_new_files_is_one_line(model: str, prompts: str) -> None:
    with pytest.raises(OutputError, match="cannot write to /proc/peagle"):
        run_grid(model=model, workload=prompts, out="/proc/peagle")


@pytest.mark.parametrize("name", ["manifest.json", "runs/train/head.safetensors"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_something_else_is_left_as_it_is(
    tmp_path: Path, name: str, overwrite: bool
) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('{"format": "peagle-dataset"}')
    with (
        pytest.raises(ConfigError, match="something other than results of peagle bench"),
        Store(tmp_path).opened(overwrite=overwrite),
    ):
        pass
    assert file.exists()


def test_files_that_others_may_not_read_are_not_blamed_on_out(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), Store(tmp_path).opened(overwrite=False):
        raise PermissionError("the model's weights")


def test_few_prompts_for_many_streams_are_remarked(
    model: str, prompts: str, tmp_path: Path
) -> None:
    watcher = Watcher()
    keys: dict[str, Any] = {"concurrency": 3, "repeats": 1, "answers_per_stream": 4}
    results = run_grid(watcher, model=model, workload=prompts, out=str(tmp_path), **keys)
    assert any("4 prompts, repeated until each of 3 streams" in note for note in watcher.notes)
    (run,) = results.cells[0].repeats
    assert (run.num_requests, run.num_repeated) == (12, 2)  # conversations of two turns
    assert run.steady_otps is not None


def test_runs_of_few_streams_may_ask_a_part_and_each_prompt_has_a_reference(
    model: str, head: str, prompts: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"spec_model": head, "repeats": 1, "min_answers": 4}
    results = run_grid(model=model, workload=prompts, out=str(tmp_path), **keys, concurrency="1,4")
    assert [c.repeats[0].num_requests for c in results.cells] == [4, 8, 4, 8]
    assert set(results.cells[0].repeats[0].categories) == {"a", "b"}
    assert results.lossless is not None
    # None's four at once has two conversations of one at a time, p-eagle's two and four.
    assert results.lossless.plain is not None
    assert results.lossless.speculative is not None
    assert results.lossless.plain.compared == 4
    assert results.lossless.speculative.compared == 4 + 8
    assert results.lossless.different == 0


def test_run_in_which_graphs_were_captured_is_made_again(
    model: str, prompts: str, tmp_path: Path
) -> None:
    steps = [0]

    def build(*arguments: Any) -> Any:
        class Compiling(DyingBackend):
            """Compiles until its 20th step: in the warm-up and in the first run."""

            @property
            def num_compiled(self) -> int:
                return min(steps[0], 20)

            def step(self) -> Any:
                steps[0] += 1
                return self.real.step()

        return Compiling(build_backend(*arguments), 0, RuntimeError())

    keys: dict[str, Any] = {"model": model, "workload": prompts, "warmup": 0, "concurrency": "1"}
    results = run_grid(build=build, out=str(tmp_path), repeats=1, **keys)
    (run,) = results.cells[0].repeats
    assert run.num_compiled == 0
    assert run.num_requests == 8
    assert steps[0] > 20 + run.num_output_tokens


def test_backend_that_refuses_every_prompt_ends_the_grid(
    model: str, prompts: str, tmp_path: Path
) -> None:
    def build(*arguments: Any) -> Any:
        backend = build_backend(*arguments)

        def refuse(*_: Any, **__: Any) -> Any:
            raise RequestError("cannot do that")

        backend.add_request = refuse  # type: ignore[method-assign]
        return backend

    with pytest.raises(RequestError, match="refuses every prompt: cannot do that"):
        run_grid(build=build, model=model, workload=prompts, out=str(tmp_path))


def test_two_workloads_of_one_name_are_refused(model: str, prompts: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two workloads are named w"):
        run_grid(model=model, workload=f"w={prompts},w={prompts}", out=str(tmp_path))


def test_two_grids_do_not_share_a_folder(model: str, prompts: str, tmp_path: Path) -> None:
    with Store(tmp_path).opened(overwrite=False), pytest.raises(OutputError, match="another"):
        run_grid(model=model, workload=prompts, out=str(tmp_path))


def test_engines_beyond_the_limit_are_closed_and_warmed_when_built_anew(
    model: str, prompts: str, tmp_path: Path
) -> None:
    alive, most, asked = 0, 0, list[int]()

    def build(*arguments: Any) -> Any:
        nonlocal alive, most
        asked.append(0)  # one entry for each engine
        alive += 1
        most = max(most, alive)
        backend = build_backend(*arguments)

        def close() -> None:
            nonlocal alive
            alive -= 1

        own = backend.add_request

        def open_(*arguments: Any, **options: Any) -> Any:
            asked[-1] += 1
            return own(*arguments, **options)

        backend.close = close  # type: ignore[method-assign]
        backend.add_request = open_  # type: ignore[method-assign]
        return backend

    keys: dict[str, Any] = {"model": model, "workload": prompts, "spec_method": "ngram"}
    keys |= {"concurrency": "1", "repeats": 2}
    run_grid(build=build, out=str(tmp_path / "a"), max_engines=1, **keys)
    assert (most, alive) == (1, 0)
    # none, ngram, ngram, none: the third engine is cold again. Warm-up is one prompt of two turns.
    assert asked == [2 + 8, 2 + 8 + 8, 2 + 8]
    run_grid(build=build, out=str(tmp_path / "b"), **keys)
    assert (most, alive) == (2, 0)


def test_grid_on_a_server_measures_it_under_the_users_name(tmp_path: Path, prompts: str) -> None:
    behaviour = Behaviour()
    keys: dict[str, Any] = {"model": "m", "workload": prompts, "repeats": 1}
    with serving(behaviour) as url:
        results = run_grid(
            backend=url, spec_method="p-eagle", spec_tokens="5", out=str(tmp_path), **keys
        )
        assert {(c.method, c.num_speculative_tokens) for c in results.cells} == {("p-eagle", 5)}
        assert all(c.repeats[0].num_output_tokens == 32 for c in results.cells)
        assert results.lossless is None
        keys |= {"concurrency": 1}
        run_grid(backend=url, spec_method="none", out=str(tmp_path), **keys)
        behaviour.chunks = ((1,), (2, 3), (9,))
        again = {"spec_method": "ngram", "spec_tokens": "2"}
        later = run_grid(backend=url, out=str(tmp_path), **again, **keys)
        assert later.lossless is not None
        assert (later.lossless.compared, later.lossless.different) == (4, 4)
        watcher = Watcher()
        run_grid(watcher, backend=url, out=str(tmp_path / "c"), **keys | {"model": "other"})
        assert any("serves m, not other" in note for note in watcher.notes)
        behaviour.dead = True
        with pytest.raises(BackendError, match="gives no answer"):
            run_grid(backend=url, out=str(tmp_path / "b"), **keys)


def test_server_that_dies_mid_grid_leaves_a_partial_result(tmp_path: Path, prompts: str) -> None:
    behaviour = Behaviour()

    class Killer(Watcher):
        def finish(self, *arguments: Any) -> None:
            super().finish(*arguments)
            behaviour.dies_after = 1

    keys: dict[str, Any] = {"model": "m", "workload": prompts, "out": str(tmp_path), "warmup": 0}
    with serving(behaviour) as url:
        with pytest.raises(BackendError, match="what was measured is kept"):
            run_grid(Killer(), backend=url, **keys)
        kept = load_results(tmp_path)
        assert kept.partial
        assert [r.partial for c in kept.cells for r in c.repeats] == [False, True]
        behaviour.dies_after = None
        assert not run_grid(backend=url, **keys).partial
