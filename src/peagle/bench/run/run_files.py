"""The file of one run: its figures, how its answers compare, and a few samples of them.

A sample is an answer token by token, with the accepted drafts marked. Of a drafter of trees there
is one tree as well, of a prompt that is answered once more behind the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from peagle.bench.results.document import (
    AnswerDifference,
    CellRun,
    Sample,
    SampleToken,
    TreeNode,
    TreeSample,
)
from peagle.bench.results.settings import NONE
from peagle.bench.results.store import AnswerKey, KeptAnswer, RunFile, Store
from peagle.bench.run.client import Record
from peagle.bench.run.driver import Outcome
from peagle.bench.run.grid import GridCell, PlannedRun
from peagle.bench.run.lossless import RunComparison, answers_of, compare_answers
from peagle.bench.run.plan import BenchPlan
from peagle.bench.run.sessions import Session
from peagle.bench.workloads.sources import OFFLINE
from peagle.engine.detokenizer import Detokenizer

if TYPE_CHECKING:
    from peagle.engine.request import DraftTree

NUM_SAMPLES = 2  # per workload and method
MOST_TOKENS = 96
TREE_TOKENS = 64  # of the answer that a tree is taken from
TOKENS_BEFORE = 12  # of it that stand before the tree


class RunFiles:
    def __init__(
        self, plan: BenchPlan, store: Store, session: Session, cells: Sequence[GridCell]
    ) -> None:
        self.store, self.session, self.cells = store, session, cells
        self.greedy = plan.temperature == 0

    def make(self, planned: PlannedRun, run: CellRun, outcome: Outcome) -> RunFile:
        compared, answers = RunComparison(), list[KeptAnswer]()
        if self.greedy and outcome.failure is None:
            reference = self.store.reference(planned.cell.workload)
            compared = self._compare(planned, outcome.records, reference)
            if planned.cell.setting.method == NONE and not planned.repeat:
                kept = answers_of(outcome.records)
                answers = [KeptAnswer(*k, ids) for k, ids in kept.items() if k not in reference]
        return RunFile(
            planned.cell.empty(),
            planned.repeat,
            run,
            compared=compared.compared,
            different=compared.different,
            not_comparable=compared.not_comparable,
            differences=compared.differences,
            samples=self._samples(planned, outcome.records),
            answers=answers,
            tree=self._tree(planned, outcome.records) if outcome.failure is None else None,
        )

    def _compare(
        self, planned: PlannedRun, records: Sequence[Record], reference: dict[AnswerKey, list[int]]
    ) -> RunComparison:
        if not reference:
            return RunComparison()
        cell = planned.cell.empty()
        about = AnswerDifference(
            method=cell.label,
            num_speculative_tokens=cell.num_speculative_tokens,
            workload=cell.workload,
            load=cell.load,
            repeat=planned.repeat,
            prompt="",
            turn=0,
            position=0,
            expected=None,
            got=None,
        )
        gaps_of = self.session.gaps_of(planned.cell.setting)
        tokenizer = self.session.tokenizer
        return compare_answers(records, reference, about, gaps_of=gaps_of, tokenizer=tokenizer)

    def _is_shown(self, planned: PlannedRun) -> bool:
        least = next(c.load for c in self.cells if c.workload == planned.cell.workload)
        is_first = not planned.repeat and planned.cell.load == least
        return is_first and self.session.tokenizer is not None

    def _tree(self, planned: PlannedRun, records: Sequence[Record]) -> TreeSample | None:
        setting = planned.cell.setting
        if setting.num_draft_nodes is None and not setting.is_auto:
            return None
        answered = [record for record in first_turns(records) if record.call.prompt is not None]
        if not answered or not self._is_shown(planned):
            return None
        call = answered[0].call
        params = replace(
            call.params, max_tokens=min(call.params.max_tokens or TREE_TOKENS, TREE_TOKENS)
        )
        trees = self.session.draft_trees(setting, call.prompt, params)
        if not trees:
            return None
        assert answered[0].answer is not None
        return tree_sample(
            usual_tree(trees),
            answered[0].answer.token_ids or [],
            self.session.tokenizer,
            workload=planned.cell.workload,
            prompt=call.task.id,
            method=planned.cell.empty().label,
            num_speculative_tokens=setting.num_speculative_tokens,
        )

    def _samples(self, planned: PlannedRun, records: Sequence[Record]) -> list[Sample]:
        """Samples are taken from the first repeat at the least load."""
        if not self._is_shown(planned):
            return []
        return samples(
            records,
            self.session.tokenizer,
            workload=planned.cell.workload,
            method=planned.cell.empty().label,
            num_speculative_tokens=planned.cell.setting.num_speculative_tokens,
        )


def samples(
    records: Sequence[Record],
    tokenizer: Any,
    *,
    workload: str,
    method: str,
    num_speculative_tokens: int,
) -> list[Sample]:
    """The first answers of the workload, cut after MOST_TOKENS. A prompt that is not our own is
    kept by its id alone: results are published, and others' texts are not ours to publish."""
    return [
        Sample(
            workload,
            record.call.task.id,
            record.call.task.turns[0] if workload == OFFLINE else "",
            method,
            num_speculative_tokens,
            _tokens(record, tokenizer),
        )
        for record in first_turns(records)[:NUM_SAMPLES]
    ]


def first_turns(records: Sequence[Record]) -> list[Record]:
    """Those that were answered, with token ids."""
    return [
        r
        for r in records
        if r.call.turn == 0 and r.call.task.turns and r.answer and r.answer.token_ids
    ]


def usual_tree(trees: Sequence[DraftTree]) -> DraftTree:
    """One with as many accepted drafts as is usual among the largest, and of these the one whose
    path strayed furthest from the best guess: the first is what a chain would have shown, too."""
    largest = max(len(tree.token_ids) for tree in trees)
    whole = [tree for tree in trees if len(tree.token_ids) == largest]
    usual = median(len(tree.accepted) for tree in whole)

    def rank(tree: DraftTree) -> tuple[float, int]:
        return -abs(len(tree.accepted) - usual), tree.accepted[-1] - len(
            tree.accepted
        ) if tree.accepted else 0

    return max(whole, key=rank)


def tree_sample(
    tree: DraftTree,
    answer: Sequence[int],
    tokenizer: Any,
    *,
    workload: str,
    prompt: str,
    method: str,
    num_speculative_tokens: int,
) -> TreeSample:
    texts = tokenizer.batch_decode([[token] for token in tree.token_ids])
    nodes = [
        TreeNode(text, parent, number in tree.accepted)
        for number, (text, parent) in enumerate(zip(texts, tree.parents, strict=True), start=1)
    ]
    before = tokenizer.decode(answer[: tree.num_outputs][-TOKENS_BEFORE:])
    is_written = tree.num_outputs + len(tree.accepted) < len(answer)  # the answer went on
    bonus = tokenizer.decode([tree.bonus_token_id]) if is_written else ""
    return TreeSample(workload, prompt, method, num_speculative_tokens, before, nodes, bonus)


def drafted_flags(record: Record) -> list[bool]:
    """A step commits the accepted drafts and then one token of the target's own. The last step
    may be cut at an accepted draft: the total of accepted drafts tells."""
    flags: list[bool] = []
    for before, after in zip((0, *record.counts), record.counts, strict=False):
        flags += [True] * (after - before - 1) + [False]
    stats = record.answer.stats if record.answer else None
    if stats is not None and not stats.num_accepted_tokens:
        return [False] * len(flags)  # a client may read two steps at once
    if flags and stats is not None and stats.num_accepted_tokens > sum(flags):
        flags[-1] = True
    return flags


def _tokens(record: Record, tokenizer: Any) -> list[SampleToken]:
    assert record.answer is not None
    assert record.answer.token_ids is not None
    texts = token_texts(tokenizer, record.answer.token_ids[:MOST_TOKENS])
    return [
        SampleToken(text, drafted)
        for text, drafted in zip(texts, drafted_flags(record), strict=False)
    ]


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a character split over tokens comes with its last one."""
    detokenizer, texts = Detokenizer(tokenizer), []
    for token in token_ids:
        before = len(detokenizer.text)
        detokenizer.append(token)
        texts.append(detokenizer.text[before:])
    return texts
