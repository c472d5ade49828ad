"""The file of one run: its figures, how its answers compare, and a few of them to look at."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.bench.calls import Record
from peagle.bench.cells import Run
from peagle.bench.driver import Outcome
from peagle.bench.grid import GridCell, Turn
from peagle.bench.lossless import AnswerKey, Compared, answers_of, compare
from peagle.bench.plan import NONE, BenchPlan
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
            reference = self.store.reference(turn.cell.workload)
            compared = self._compare(turn, outcome.records, reference)
            if turn.cell.drafting.method == NONE and not turn.repeat:
                kept = answers_of(outcome.records)
                answers = [KeptAnswer(*k, ids) for k, ids in kept.items() if k not in reference]
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

    def _compare(
        self, turn: Turn, records: Sequence[Record], reference: dict[AnswerKey, list[int]]
    ) -> Compared:
        if not reference:
            return Compared()
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
        gaps_of = self.session.gaps_of(turn.cell.drafting)
        tokenizer = self.session.tokenizer
        return compare(records, reference, about, gaps_of=gaps_of, tokenizer=tokenizer)

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
