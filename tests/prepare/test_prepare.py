"""Rows hold what the target generated, whole conversations at a time, once each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.config import EngineConfig
from peagle.data import dataset as dataset_module
from peagle.data.dataset import Dataset, DatasetWriter
from peagle.data.prompts import BadPrompt, Conversation
from peagle.engine.engine import Engine
from peagle.errors import DataError, OutputError, RequestError
from peagle.prepare.answers import EmbeddedAnswers, Question, TargetAnswer
from peagle.prepare.dataset_spec import DatasetSpec
from peagle.prepare.preparation import ALL_ROWS, Preparation, PreparationCounts
from peagle.progress import shown_by
from peagle.sampling_params import SamplingParams
from tests.tiny.displays import Remembering
from tests.tiny.folders import byte_tokenizer
from tests.tiny.models import SHALLOW

ROOT = Path(__file__).parents[2]
TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


def ids(text: str) -> list[int]:
    out: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return out


class Scripted:
    """Answers `script(prompt text)`, the newest question first."""

    def __init__(self, script: Callable[[str], TargetAnswer], capacity: int = 3) -> None:
        self.script, self.capacity = script, capacity
        self.asked: list[str] = []
        self.open: list[Question] = []

    def submit(self, question: Question) -> None:
        text = TOKENIZER.decode(question.prompt_token_ids)
        if "refused" in text:
            raise RequestError("the engine refuses this")
        assert len(self.open) < self.capacity
        self.asked.append(text)
        self.open.append(question)

    def collect(self) -> list[tuple[Question, TargetAnswer]]:
        question = self.open.pop()
        return [(question, self.script(TOKENIZER.decode(question.prompt_token_ids)))]

    def close(self) -> None:
        self.open = []


def echo(prompt: str) -> TargetAnswer:
    return TargetAnswer([*ids(f"re: {prompt[-20:]}"), END])


def prepare(
    folder: Path,
    conversations: list[Conversation],
    source: Any,
    cut_loops: int | None = None,
    bad: tuple[BadPrompt, ...] = (),
    **options: Any,
) -> PreparationCounts:
    spec = DatasetSpec(target="tiny", params=GREEDY, cut_loops=cut_loops)
    writer = DatasetWriter(folder, spec.record(TOKENIZER), rows_per_shard=ALL_ROWS)
    return Preparation(writer, source, spec.dialogue_options(TOKENIZER), **options)(
        conversations, bad
    )


def one_turn(count: int) -> list[Conversation]:
    return [Conversation(f"row-{n}", (f"question {n}",)) for n in range(count)]


def test_the_mask_is_one_on_generated_ids_alone(tmp_path: Path) -> None:
    target = SHALLOW.make_target(torch.float32, vocab_size=len(TOKENIZER))
    engine = Engine(target, EngineConfig(max_num_seqs=2), eos_token_ids=[END])
    conversations = [Conversation(f"r{n}", ("a" * (n + 1),), category="x") for n in range(7)]
    counts = prepare(tmp_path, conversations, EmbeddedAnswers(engine, GREEDY))
    assert (counts.answered, counts.failed) == (7, 0)
    dataset = Dataset(tmp_path)
    assert not engine.has_unfinished
    for n in range(7):
        row = dataset[n]
        prompt = ids(f"<|user|>{'a' * int(row.id[1:])}a\n<|assistant|>")
        assert list(row.token_ids[: len(prompt)]) == prompt
        assert list(row.loss_mask) == [0] * len(prompt) + [1] * (len(row.token_ids) - len(prompt))
        assert row.clipped == (int(row.token_ids[-1]) != END)
        assert row.category == "x"


def test_sampled_answers_do_not_depend_on_their_neighbours(tmp_path: Path) -> None:
    target = SHALLOW.make_target(torch.float32, vocab_size=len(TOKENIZER))
    params = SamplingParams(temperature=1.0, max_tokens=12)
    found = []
    for name, conversations in (("all", one_turn(5)), ("one", one_turn(5)[3:4])):
        engine = Engine(target, EngineConfig(max_num_seqs=2), eos_token_ids=[END])
        prepare(tmp_path / name, conversations, EmbeddedAnswers(engine, params))
        dataset = Dataset(tmp_path / name)
        found.append({dataset[n].id: list(dataset[n].token_ids) for n in range(len(dataset))})
    assert found[1]["row-3"] == found[0]["row-3"]
    assert found[0]["row-3"][-12:] != found[0]["row-2"][-12:]


def test_turns_that_extend_each_other_make_one_row(tmp_path: Path) -> None:
    # Clipped answers: the template writes no end of its own, so the next prompt extends them.
    source = Scripted(lambda prompt: TargetAnswer(ids("yes"), clipped=True))
    prepare(tmp_path, [Conversation("c", ("one", "two"), system="S")], source)
    (row,) = (Dataset(tmp_path)[0],)
    text = "<|system|>S\n<|user|>one\n<|assistant|>yes\n<|user|>two\n<|assistant|>yes"
    assert TOKENIZER.decode(list(row.token_ids)) == text
    answered = [int(t) for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m]
    assert answered == ids("yes") * 2


def test_a_turn_that_serving_would_tokenize_otherwise_starts_a_new_row(tmp_path: Path) -> None:
    # "abc" is one token when it is read back, three when it was generated like this.
    source = Scripted(lambda prompt: TargetAnswer([*ids("a"), *ids("b"), *ids("c"), END]))
    prepare(tmp_path, [Conversation("c", ("one", "two"))], source)
    dataset = Dataset(tmp_path)
    assert [row["id"] for row in dataset.info] == ["c", "c#2"]
    second = dataset[1]
    assert TOKENIZER.decode(list(second.token_ids[:-4])).endswith("abc\n<|user|>two\n<|assistant|>")
    assert list(second.loss_mask[-4:]) == [1, 1, 1, 1]
    assert int(torch.as_tensor(second.loss_mask).sum()) == 4


def test_loops_are_cut_and_end_the_conversation(tmp_path: Path) -> None:
    looping = TargetAnswer([*ids("fine!"), *ids("la ") * 60])
    for cut_loops, kept in ((10, 15), (None, 5 + 180)):
        folder = tmp_path / str(cut_loops)
        source = Scripted(lambda prompt: looping)
        prepare(folder, [Conversation("c", ("one", "two"))], source, cut_loops)
        row = Dataset(folder)[0]
        assert row.looping
        first = list(row.loss_mask).index(1)
        assert sum(row.loss_mask[first : first + 185].tolist()) == kept
        assert len(source.asked) == (1 if cut_loops else 2)


def test_failures_are_written_down_and_tried_again(tmp_path: Path) -> None:
    conversations = [
        *one_turn(2),
        Conversation("odd", ("refused",)),
        Conversation("nan", ("poison",)),
    ]

    def script(prompt: str) -> TargetAnswer:
        return TargetAnswer([], error="NaN logits") if "poison" in prompt else echo(prompt)

    bad = (BadPrompt("p.jsonl:9", "not valid JSON"),)
    counts = prepare(tmp_path, conversations, Scripted(script), bad=bad)
    assert (counts.answered, counts.failed) == (2, 3)
    lines = [json.loads(line) for line in (tmp_path / "errors.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == ["p.jsonl:9", "odd", "nan"]
    assert lines[2]["error"] == "NaN logits"
    source = Scripted(echo)
    counts = prepare(tmp_path, conversations, source)
    assert (counts.already_done, counts.answered, counts.failed) == (2, 1, 1)
    assert "poison" in source.asked[0]


def test_long_prompts_are_skipped_and_counted(tmp_path: Path) -> None:
    conversations = [
        *one_turn(2),
        Conversation("long", ("x" * 99,)),
        Conversation("late", ("a", "y" * 99)),
    ]
    counts = prepare(tmp_path, conversations, Scripted(echo), max_prompt_tokens=60)
    assert (counts.answered, counts.too_long, counts.failed) == (3, 2, 0)
    assert {row["id"] for row in Dataset(tmp_path).info} == {"row-0", "row-1", "late"}


def test_a_conversation_that_outgrows_the_context_keeps_its_answers(tmp_path: Path) -> None:
    conversations = [
        Conversation("c", ("one", "refused", "three")),
        Conversation("d", ("refused",)),
    ]
    counts = prepare(tmp_path, conversations, Scripted(echo))
    assert (counts.answered, counts.too_long, counts.failed) == (1, 1, 1)
    (row,) = Dataset(tmp_path).info
    assert row["id"] == "c"


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    display = Remembering()
    with shown_by(display):
        prepare(tmp_path, one_turn(5), Scripted(echo))
    work = display.work("answering")
    assert (work.done, work.total) == (5, 5)
    assert work.note.endswith("tokens/s")


def test_an_interrupted_run_keeps_its_rows_and_the_next_adds_the_rest(tmp_path: Path) -> None:
    def script(prompt: str) -> TargetAnswer:
        if "question 2" in prompt:
            raise KeyboardInterrupt
        return echo(prompt)

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, one_turn(6), Scripted(script, capacity=1))
    assert len(Dataset(tmp_path)) == 2
    source = Scripted(echo)
    prepare(tmp_path, one_turn(6), source)
    assert sorted(row["id"] for row in Dataset(tmp_path).info) == [f"row-{n}" for n in range(6)]
    assert len(source.asked) == 4


def test_a_full_disk_is_one_line_and_loses_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, one_turn(2), Scripted(echo))

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dataset_module, "write_atomic", full)
        with pytest.raises(OutputError, match="No space left on device"):
            prepare(tmp_path, one_turn(6), Scripted(echo), flush_seconds=0)
    assert len(Dataset(tmp_path)) == 2
    prepare(tmp_path, one_turn(6), Scripted(echo))
    assert len(Dataset(tmp_path)) == 6


def test_other_options_do_not_mix(tmp_path: Path) -> None:
    prepare(tmp_path, one_turn(1), Scripted(echo))
    with pytest.raises(DataError, match=r"other options: cut_loops: null -> 5"):
        prepare(tmp_path, one_turn(2), Scripted(echo), cut_loops=5)


KILLED = """
import sys, time
from pathlib import Path
from tests.prepare import test_prepare as t

def slow(prompt):
    time.sleep(0.02)
    return t.echo(prompt)

t.prepare(Path(sys.argv[1]), t.one_turn(400), t.Scripted(slow, capacity=8), flush_seconds=0)
"""


@pytest.mark.slow
def test_a_killed_run_resumes_without_losing_or_repeating_rows(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT)
    wait_for(tmp_path / "shard-00009.json", child)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    before = len(Dataset(tmp_path))
    assert 9 <= before < 400
    counts = prepare(tmp_path, one_turn(400), Scripted(echo))
    assert counts.already_done == before
    assert sorted(r["id"] for r in Dataset(tmp_path).info) == sorted(f"row-{n}" for n in range(400))


def wait_for(path: Path, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
