"""A few answers token by token, with the accepted drafts marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peagle.bench.calls import Record
from peagle.bench.results import Sample, SampleToken
from peagle.bench.workloads import OFFLINE
from peagle.engine.detokenizer import Detokenizer

NUM_SAMPLES = 2  # per workload and method
MOST_TOKENS = 96


def samples(
    records: Sequence[Record],
    tokenizer: Any,
    *,
    workload: str,
    method: str,
    num_speculative_tokens: int,
) -> list[Sample]:
    """The first answers of the workload, cut after MOST_TOKENS. Of prompts that are not our own
    only the id is kept: results are published, and others' texts are not ours to publish."""
    first_turns = [
        r
        for r in records
        if r.call.turn == 0 and r.call.task.turns and r.answer and r.answer.token_ids
    ]
    return [
        Sample(
            workload,
            record.call.task.id,
            record.call.task.turns[0] if workload == OFFLINE else "",
            method,
            num_speculative_tokens,
            _tokens(record, tokenizer),
        )
        for record in first_turns[:NUM_SAMPLES]
    ]


def drafted_flags(record: Record) -> list[bool]:
    """A step commits the accepted drafts and then one token of the target's own. The last step
    may be cut at an accepted draft: the total of accepted drafts tells."""
    flags: list[bool] = []
    for before, after in zip((0, *record.counts), record.counts, strict=False):
        flags += [True] * (after - before - 1) + [False]
    stats = record.answer.stats if record.answer else None
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
