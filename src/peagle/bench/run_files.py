"""The file of one run: its figures, how its answers compare, and a few of them to look at."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.bench.calls import Record
from peagle.bench.cells import Run
from peagle.bench.driver import Outcome
from peagle.bench.grid import GridCell, Turn, reference_of
from peagle.bench.lossless import Compared, answers_of, compare
from peagle.bench.plan import BenchPlan
from peagle.bench.results import Difference, Sample
from peagle.bench.samples import samples
from peagle.bench.sessions import Session
from peagle.bench.store import KeptAnswer, RunFile, Store


class RunFiles:
    def __init__(
        self, plan: BenchPlan, store: Store, session: Session, cells: Sequence[GridCell]
    ) -> None:
        self.store, self.session, self.cells = store, session, cells
        self.greedy = plan.temperature == 0

    def make(self, turn: Turn, run: Run, outcome: Outcome) -> RunFile:
        compared, answers = Compared(), list[KeptAnswer]()
        if self.greedy and outcome.failure is None:
            if turn == self._reference(turn.cell.workload):
                kept = answers_of(outcome.records)
                answers = [KeptAnswer(*key, token_ids) for key, token_ids in kept.items()]
            else:
                compared = self._compare(turn, outcome.records)
        return RunFile(
            turn.cell.empty(),
            turn.repeat,
            run,
            compared=compared.compared,
            different=compared.different,
            not_comparable=compared.not_comparable,
            differences=compared.differences,
            samples=self._samples(turn, outcome.records),
            answers=answers,
        )

    def _reference(self, workload: str) -> Turn | None:
        cell = reference_of(self.cells, workload)
        return None if cell is None else Turn(cell, 0)

    def _reference_file(self, workload: str) -> RunFile | None:
        """A grid without none (a server has one method at a time) takes the folder's, if any."""
        reference = self._reference(workload)
        return self.store.load(reference) if reference else self.store.reference(workload)

    def _compare(self, turn: Turn, records: Sequence[Record]) -> Compared:
        file = self._reference_file(turn.cell.workload)
        if file is None:
            return Compared()
        expected = {(a.prompt, a.turn): a.token_ids for a in file.answers}
        cell = turn.cell.empty()
        about = Difference(
            method=cell.label,
            num_speculative_tokens=cell.num_speculative_tokens,
            workload=cell.workload,
            load=cell.load,
            repeat=turn.repeat,
            prompt="",
            turn=0,
            position=0,
            expected=None,
            got=None,
        )
        gap_of = self.session.gap_of(turn.cell.drafting)
        return compare(records, expected, about, gap_of=gap_of, tokenizer=self.session.tokenizer)

    def _samples(self, turn: Turn, records: Sequence[Record]) -> list[Sample]:
        """From the first repeat at the least load."""
        least = next(c.load for c in self.cells if c.workload == turn.cell.workload)
        if turn.repeat or turn.cell.load != least or self.session.tokenizer is None:
            return []
        return samples(
            records,
            self.session.tokenizer,
            workload=turn.cell.workload,
            method=turn.cell.empty().label,
            num_speculative_tokens=turn.cell.drafting.num_speculative_tokens,
        )
