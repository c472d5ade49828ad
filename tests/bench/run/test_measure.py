"""Records of a run -> its figures."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from peagle.bench.results.document import is_busy
from peagle.bench.run.client import ClientAnswer
from peagle.bench.run.driver import Outcome
from peagle.bench.run.measure import measure, quantiles
from peagle.bench.run.meters import CpuMeter, GpuWatch, Meters, mean_utilization
from peagle.bench.run.run_files import usual_tree
from peagle.bench.workloads.workload import Task
from peagle.engine.request import DraftTree

from .fakes import record


def test_latencies_are_those_of_the_definitions() -> None:
    one = record([1.5, 2.0, 4.0], [1, 3, 5], begun=1.0)
    latencies = measure(Outcome([one])).latencies
    assert latencies.ttft is not None
    assert latencies.tpot is not None
    assert latencies.itl is not None
    assert latencies.e2el is not None
    assert latencies.ttft.p50 == 0.5
    assert latencies.tpot.p50 == pytest.approx(2.5 / 4)  # four tokens after the first
    assert latencies.itl.mean == pytest.approx(1.25)  # gaps of 0.5 and 2.0 between chunks
    assert latencies.e2el.p50 == 3.0


def test_one_token_has_no_time_per_token() -> None:
    latencies = measure(Outcome([record([1.0], [1])])).latencies
    assert latencies.tpot is None
    assert latencies.itl is None


def test_speed_is_tokens_over_the_time_from_first_start_to_last_token() -> None:
    records = [record([2.0], [4], begun=1.0), record([3.0, 5.0], [2, 6], begun=1.5)]
    run = measure(Outcome(records))
    assert run.wall_s == 4.0
    assert run.num_output_tokens == 10
    assert run.otps == 2.5


def test_steady_speed_leaves_the_tail_away() -> None:
    streams = [record([2.0, 4.0], [3, 4], begun=n % 2, task=Task(f"t{n}", ("x",))) for n in (0, 1)]
    last = [record([8.0], [4], begun=3.0, task=Task(name, ("x",))) for name in ("t2", "t0~2")]
    run = measure(Outcome([*streams, *last]), concurrency=2)
    assert run.otps == 16 / 8
    assert run.steady_otps == 6 / 3  # both streams were busy from 0 to 3, and had 3 tokens each
    assert run.num_repeated == 1
    assert measure(Outcome(streams), concurrency=2).steady_otps is None  # one prompt a stream
    assert measure(Outcome(streams)).steady_otps is None


def test_looping_answers_are_counted_and_left_out_of_the_acceptance() -> None:
    loop = record([1.0], [60], token_ids=[7, 8] * 30, accepted=[(5, 5)] * 4)
    steady = record([1.0], [60], token_ids=range(60), accepted=[(5, 1)] * 4)
    run = measure(Outcome([loop, steady]))
    assert run.looping_share == 0.5
    assert run.acceptance_length == pytest.approx(1 + 24 / 8)
    assert run.acceptance_without_looping == pytest.approx(2.0)


def test_without_token_ids_looping_is_unknown() -> None:
    silent = record([1.0], [3], answer=ClientAnswer("text", 3))
    run = measure(Outcome([silent]))
    assert run.num_output_tokens == 3
    assert (run.looping_share, run.acceptance_without_looping, run.stats) == (None, None, {})


def test_failed_request_makes_a_run_partial_and_is_named() -> None:
    failed = record([1.0], [1], answer=ClientAnswer("", 0, error="NaN"), task=Task("p7", ("x",)))
    run = measure(Outcome([failed, record([2.0], [2])]))
    assert run.partial
    assert run.errors == ["p7, turn 1: NaN"]
    assert run.num_requests == 1


def test_answer_that_was_cut_short_counts_neither_as_answered_nor_as_error() -> None:
    run = measure(Outcome([record([1.0], [2], answer=None)], KeyboardInterrupt()))
    assert (run.num_requests, run.num_output_tokens, run.partial) == (0, 0, True)
    assert run.otps == 0.0


def test_categories_have_their_own_acceptance() -> None:
    code = record([1.0], [4], accepted=[(3, 3)], task=Task("a", ("x",), category="code"))
    chat = record([1.0], [2], accepted=[(3, 1)], task=Task("b", ("x",), category="chat"))
    categories = measure(Outcome([code, chat])).categories
    assert categories["code"].acceptance_length == 4.0
    assert categories["chat"].acceptance_length == 2.0


def test_no_values_have_no_quantiles() -> None:
    assert quantiles([]) is None


def test_peak_memory_is_that_of_the_run_and_forgets_what_came_before() -> None:
    before = bytearray(300 << 20)
    before[::4096] = b"x" * len(before[::4096])
    del before
    with Meters("cpu") as meters:
        block = bytearray(64 << 20)
        block[::4096] = b"x" * len(block[::4096])
        del block
    with Meters("cpu") as calm:
        pass
    assert meters.peak_memory_bytes is not None
    assert calm.peak_memory_bytes is not None
    assert meters.peak_memory_bytes > calm.peak_memory_bytes + (50 << 20)
    assert meters.gpu_utilization is None


def stat(*cpus: str) -> str:
    """A /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice."""
    rows = [f"cpu{n} {ticks} 0 0" for n, ticks in enumerate(cpus)]
    return "\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *rows, "intr 1 2 3", ""])


@pytest.mark.parametrize(
    ("after", "others"),
    [
        (("0 0 0 100 0 0 0 0", "0 0 0 90 10 0 0 0"), 0.0),  # waiting for a disk is idle
        (("100 0 0 0 0 0 0 0", "0 0 0 100 0 0 0 0"), 0.5),
        (("0 0 0 60 0 0 0 40", "0 0 0 100 0 0 0 0"), 0.2),  # another machine's
        (("1 0 0 8 0 0 0 0", "1 0 0 8 0 0 0 0"), None),  # too short to tell
    ],
)
def test_what_others_took_of_our_cpus_is_measured(
    after: tuple[str, str], others: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stat"
    monkeypatch.setattr("peagle.bench.run.meters.STAT", file)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("os.times", lambda: os.times_result((0.0,) * 5))
    foreign = "500 0 0 0 0 0 0 0"  # a CPU that we may not use
    file.write_text(stat("0 0 0 0 0 0 0 0", "0 0 0 0 0 0 0 0", "0 0 0 0 0 0 0 0"))
    with CpuMeter() as meter:
        file.write_text(stat(*after, foreign))
    assert meter.others == others
    assert is_busy(meter.others) == (others is not None and others > 0.1)


def test_our_own_work_is_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([(0.0, 0.0, 0.0), (100.0, 80.0, 60.0)])
    monkeypatch.setattr("peagle.bench.run.meters._cpu_ticks", lambda: next(ticks))
    with CpuMeter() as meter:
        pass
    assert meter.others == pytest.approx(0.2)


def test_others_are_unknown_where_the_system_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.bench.run.meters.STAT", tmp_path / "missing")
    with CpuMeter() as meter:
        pass
    assert meter.others is None
    assert not is_busy(None)


def test_an_engine_elsewhere_is_not_somebody_else() -> None:
    with Meters(None) as meters:
        deadline = time.perf_counter() + 0.3
        while time.perf_counter() < deadline:
            pass
    assert meters.other_cpu_share is None


def test_utilization_is_the_busiest_gpus_mean() -> None:
    assert mean_utilization(["0, 90", "1, 0", "0, 70", "1, 10"]) == pytest.approx(0.8)
    assert mean_utilization(["0, [N/A]"]) is None
    assert mean_utilization([]) is None


def test_gpu_use_is_that_of_the_time_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0, 90\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    begun, watch = time.perf_counter(), GpuWatch()
    try:
        while watch.mean(begun, time.perf_counter()) is None:
            time.sleep(0.01)
            assert time.perf_counter() < begun + 30
        assert watch.mean(begun - 2, begun - 1) is None
        with Meters(None, watch) as meters:
            pass
        assert meters.gpu_utilization is None  # nothing was said meanwhile
    finally:
        watch.close()


def test_gpu_use_is_unknown_without_the_drivers_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    watch = GpuWatch()
    assert watch.mean(0.0, time.perf_counter()) is None
    watch.close()


def test_the_tree_that_is_shown_is_usual_in_size_and_unusual_in_its_path() -> None:
    def tree(size: int, *path: int) -> DraftTree:
        return DraftTree(1, [7] * size, [0] * size, list(path), 9)

    lucky, usual, strayed = tree(9, 1, 2, 3, 4, 5), tree(9, 1, 2), tree(9, 3, 8)
    unlucky, cut = tree(9), tree(4, 1, 4)
    assert usual_tree([lucky, usual, strayed, unlucky, cut]) is strayed
    assert usual_tree([unlucky]) is unlucky
