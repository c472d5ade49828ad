"""Runs a grid: every cell's repeats in their order, each written to a file when it is done."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from peagle.bench.results.document import CellRun, Manifest, Results, save_results
from peagle.bench.results.settings import Setting
from peagle.bench.results.store import Store, assemble
from peagle.bench.run.driver import Load, Outcome, drive
from peagle.bench.run.grid import GridCell, PlannedRun, run_order
from peagle.bench.run.measure import measure
from peagle.bench.run.meters import GpuWatch, Meters
from peagle.bench.run.plan import BenchPlan
from peagle.bench.run.run_files import RunFiles
from peagle.bench.run.server_metrics import difference
from peagle.bench.run.sessions import Session
from peagle.bench.workloads.workload import Task, Workload
from peagle.errors import BackendError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.speculation.noise import derive_seed

WARMUP_TOKENS = 32  # on a GPU whole answers: graphs of longer contexts are captured too
WARMUP_REQUESTS = 4  # where a request rate does not say how many run at once
MOST_TRIES = 3  # a run is repeated while the backend has to compile something
MOST_SAVING = 0.05  # share of the time that may go into results.json; each run has its own file


class GridProgress(Protocol):
    """What a grid tells whoever watches it."""

    def begin(self, todo: Sequence[PlannedRun], num_done: int) -> None: ...

    def start(self, planned: PlannedRun) -> None: ...

    def finish(self, planned: PlannedRun, run: CellRun, seconds: float) -> None: ...


class GridRunner:
    def __init__(
        self,
        plan: BenchPlan,
        manifest: Manifest,
        store: Store,
        session: Session,
        workloads: Mapping[str, Workload],
        cells: Sequence[GridCell],
        progress: GridProgress,
    ) -> None:
        self.plan, self.manifest, self.store, self.session = plan, manifest, store, session
        self.workloads, self.cells, self.progress = workloads, cells, progress
        self.planned = list(run_order(cells, plan.repeats, interleave=plan.interleave))
        self.files = RunFiles(plan, store, session, cells)
        self.warm: set[tuple[int, Setting, Load]] = set()
        self.watch: GpuWatch | None = None
        self._next_save = 0.0

    def run(self) -> Results:
        """Raises what cut it short, after keeping what there is."""
        todo = [planned for planned in self.planned if not self._is_done(planned)]
        self.progress.begin(todo, len(self.planned) - len(todo))
        self.watch = GpuWatch() if self.session.device != "cpu" else None
        try:
            for planned in todo:
                begun = time.perf_counter()
                self.progress.start(planned)
                self.progress.finish(planned, self._run(planned), time.perf_counter() - begun)
                self._save_now_and_then()
        except BackendError as error:
            kept = f"what was measured is kept in {self.store.folder}"
            raise BackendError(f"{error.message}; {kept}", hint=error.hint) from error
        finally:
            if self.watch is not None:
                self.watch.close()
            results = self.save()
        return results

    def save(self) -> Results:
        cells = [cell.empty() for cell in self.cells]
        runs = [(planned.cell.empty(), planned.repeat) for planned in self.planned]
        results = assemble(self.manifest, cells, runs, self.store.load_all())
        save_results(results, self.store.folder)
        return results

    def _save_now_and_then(self) -> None:
        begun = time.perf_counter()
        if begun >= self._next_save:
            self.save()
            ended = time.perf_counter()
            self._next_save = ended + (ended - begun) / MOST_SAVING

    def _is_done(self, planned: PlannedRun) -> bool:
        file = self.store.load(planned.cell.empty(), planned.repeat)
        return file is not None and not file.run.partial

    def _run(self, planned: PlannedRun) -> CellRun:
        self._warm_up(planned.cell)
        for _ in range(MOST_TRIES):
            outcome, run = self._ask(planned.cell)
            if outcome.failure is not None or not run.num_compiled:
                break
        self.store.save(self.files.make(planned, run, outcome))
        if outcome.failure is not None:
            raise outcome.failure
        return run

    def _ask(self, cell: GridCell) -> tuple[Outcome, CellRun]:
        session, params = self.session, self._params_of(cell)
        client, tasks = session.client(cell.setting), self._tasks(cell)
        before, compiled = session.counters(), session.num_compiled(cell.setting)
        with Meters(session.device, self.watch) as meters:
            outcome = drive(client, tasks, cell.load, params, seed=self.plan.seed)
        after = session.counters()
        _refuse_a_run_of_refusals(outcome)
        run = measure(
            outcome,
            meters,
            difference(before, after) if after is not None else None,
            concurrency=cell.load.concurrency,
            num_compiled=session.num_compiled(cell.setting) - compiled,
        )
        return outcome, run

    def _warm_up(self, cell: GridCell) -> None:
        """Runs once per engine, drafter and load, so that code is compiled and memory touched
        before it counts. An engine that was closed and built anew is cold again."""
        count = self.plan.warmup
        if count is None:
            count = cell.load.concurrency or WARMUP_REQUESTS
        if not count:
            return
        key = (self.session.engine_number(cell.setting), cell.setting, cell.load)
        if key in self.warm:
            return
        self.warm.add(key)
        tasks = self.workloads[cell.workload].first(count)
        load = Load(concurrency=cell.load.concurrency or count)
        client = self.session.client(cell.setting)
        most_tokens = None if self._has_graphs else WARMUP_TOKENS
        outcome = drive(client, tasks, load, self._params_of(cell, most_tokens=most_tokens))
        if outcome.failure is not None:
            raise outcome.failure

    @property
    def _has_graphs(self) -> bool:
        return self.session.device is not None and self.session.device.startswith("cuda")

    def _tasks(self, cell: GridCell) -> list[Task]:
        workload, plan = self.workloads[cell.workload], self.plan
        least = plan.min_answers and workload.num_tasks_of(plan.min_answers)
        per_stream = workload.num_tasks_of(plan.answers_per_stream)
        streams = cell.load.concurrency or 0
        return workload.first(max(least or len(workload.tasks), per_stream * streams))

    def _params_of(self, cell: GridCell, most_tokens: int | None = None) -> RequestParams:
        workload = self.workloads[cell.workload]
        max_tokens = workload.max_tokens or self.plan.max_tokens
        return RequestParams(
            self.plan,
            min(max_tokens, most_tokens or max_tokens),
            self.plan.ignore_eos or workload.ignore_eos,
            self.session.depth(cell.setting),
        )


def _refuse_a_run_of_refusals(outcome: Outcome) -> None:
    """Where every prompt is refused, the reason does not lie in the prompts."""
    refused = [record.answer for record in outcome.records if record.refused]
    if refused and len(refused) == len(outcome.records):
        assert refused[0] is not None
        raise RequestError(f"the backend refuses every prompt: {refused[0].error}")


class RequestParams:
    """Parameters of a task's turn. Each has its own seed, the same in every cell and repeat."""

    def __init__(
        self, plan: BenchPlan, max_tokens: int, ignore_eos: bool, depth: int | None
    ) -> None:
        self.plan, self.max_tokens = plan, max_tokens
        self.ignore_eos, self.depth = ignore_eos, depth
        self._seeds: dict[str, int] = {}

    def __call__(self, task: Task, turn: int) -> SamplingParams:
        number = self._seeds.setdefault(task.id, len(self._seeds))
        return SamplingParams(
            temperature=self.plan.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            seed=derive_seed(derive_seed(self.plan.seed, number), turn),
            num_speculative_tokens=self.depth,
        )
