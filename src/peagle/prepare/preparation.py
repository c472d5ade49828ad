"""Prompts -> the target's own answers -> rows of token ids with a loss mask.

Rows are made safe every few seconds, whole conversations at a time, so a kill costs little and a
second run skips exactly what is on disk.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from peagle.data.dataset import DatasetWriter
from peagle.data.prompts import BadPrompt, Conversation
from peagle.errors import DataError, RequestError
from peagle.files import writing
from peagle.prepare.answers import AnswerSource, Question, TargetAnswer
from peagle.prepare.dialogue import Dialogue, DialogueOptions
from peagle.processes import uninterrupted
from peagle.progress import Work, track

ERRORS = "errors.jsonl"
GO_ON = "give the same command again: rows written before are safe"
ALL_ROWS = 1 << 62  # the writer must not cut a conversation in two: we say when to flush


@dataclass
class PreparationCounts:
    """What became of the conversations of one run."""

    already_done: int = 0
    answered: int = 0
    too_long: int = 0
    failed: int = 0
    num_tokens: int = 0


@dataclass
class Preparation:
    """One run over a list of conversations."""

    writer: DatasetWriter  # with ALL_ROWS per shard
    source: AnswerSource
    options: DialogueOptions
    max_prompt_tokens: int | None = None
    flush_seconds: float = 20.0
    counts: PreparationCounts = field(default_factory=PreparationCounts)
    _num_done: int = 0

    def __call__(
        self, conversations: Sequence[Conversation], bad: Sequence[BadPrompt] = ()
    ) -> PreparationCounts:
        done = self.writer.row_ids()
        todo = [c for c in conversations if c.id not in done]
        self.counts.already_done = len(conversations) - len(todo)
        with writing(self.writer.folder, then=GO_ON):
            self.errors.write_text("")  # what failed before is tried again
            for where, error in bad:
                self._fail(where, error)
            gc.collect()
            gc.freeze()  # else each full collection looks at all libraries while a GPU waits
            try:
                with track("answering", len(todo), "prompts") as work:
                    self._answer_all(todo, work)
            finally:  # after Ctrl-C or a lost endpoint, too
                gc.unfreeze()
                with uninterrupted():
                    self.writer.flush()
                self.source.close()
        self.counts.failed += len(bad)
        return self.counts

    def _answer_all(self, todo: Sequence[Conversation], work: Work) -> None:
        opened = self._open(todo)
        dialogues: dict[Question, Dialogue] = {}
        begun = flushed = monotonic()
        while True:
            while len(dialogues) < self.source.capacity and (pair := next(opened, None)):
                dialogues[pair[0]] = pair[1]
            if not dialogues:
                return
            answers = self.source.collect()  # may be interrupted: what it loses is asked again
            with uninterrupted():
                for question, answer in answers:
                    dialogue = dialogues.pop(question)
                    following = self._take(dialogue, question, answer)
                    if following is not None:
                        dialogues[following] = dialogue
                now = monotonic()
                if now - flushed > self.flush_seconds:
                    self.writer.flush()
                    flushed = now
            num_tokens = self.counts.num_tokens
            work.reach(self._num_done, f"{num_tokens / max(now - begun, 1e-9):.0f} tokens/s")

    def _open(self, todo: Sequence[Conversation]) -> Iterator[tuple[Question, Dialogue]]:
        """First questions, asked when they are drawn from here."""
        for conversation in todo:
            dialogue = Dialogue(conversation, self.options)
            question = self._ask(dialogue)
            if question is not None:
                yield question, dialogue

    def _take(
        self, dialogue: Dialogue, question: Question, answer: TargetAnswer
    ) -> Question | None:
        self.counts.num_tokens += len(answer.token_ids)
        if answer.error is not None:
            self._lose(dialogue, answer.error)
            return None
        dialogue.take(question, answer)
        return self._ask(dialogue)

    def _ask(self, dialogue: Dialogue) -> Question | None:
        """Sends the dialogue's next question. None: it is over, for good or bad."""
        try:
            question = dialogue.next_question()
            if question is None:
                self._keep(dialogue)
            elif self._too_long(question):
                self.counts.too_long += 1
                self._keep(dialogue)
                return None
            else:
                self.source.submit(question)
            return question
        except RequestError as error:  # mostly: the conversation has outgrown the context
            if not dialogue.num_answers:
                self._lose(dialogue, error.message)
                return None
            self.counts.too_long += 1
            self._keep(dialogue)
            return None
        except DataError as error:
            self._lose(dialogue, error.message)
            return None

    def _too_long(self, question: Question) -> bool:
        longest = self.max_prompt_tokens
        return longest is not None and len(question.prompt_token_ids) > longest

    def _keep(self, dialogue: Dialogue) -> None:
        self._num_done += 1
        rows = dialogue.finish()
        for row in rows:
            self.writer.add(row)
        self.counts.answered += bool(rows)

    def _lose(self, dialogue: Dialogue, error: str) -> None:
        self._num_done += 1
        self.counts.failed += 1
        self._fail(dialogue.conversation.id, error)

    def _fail(self, name: str, error: str) -> None:
        line = json.dumps({"row": name, "error": error}, ensure_ascii=False)
        with self.errors.open("a", encoding="utf-8", errors="replace") as file:
            file.write(line + "\n")

    @property
    def errors(self) -> Path:
        return self.writer.folder / ERRORS
