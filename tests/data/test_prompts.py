"""Prompts from files, folders and datasets; a bad line is named, the others are kept."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.data.prompts import Conversation, parse, read_prompts
from peagle.errors import DataError


def write(path: Path, *records: Any) -> Path:
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    content = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_each_key_becomes_a_conversation() -> None:
    assert parse({"id": 7, "prompt": "Hi", "category": "chat"}) == Conversation(
        "7", ("Hi",), None, "chat"
    )
    assert parse({"turns": ["a", "b"]}).turns == ("a", "b")
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "somebody else's answer"},
        {"role": "user", "content": "b"},
    ]
    talk = parse({"messages": messages})
    assert (talk.system, talk.turns) == ("Be brief", ("a", "b"))


def test_a_prompt_without_id_is_named_by_its_content() -> None:
    assert parse({"prompt": "Hi"}).id == parse({"prompt": "Hi", "category": "x"}).id
    assert parse({"prompt": "Hi"}).id != parse({"prompt": "Ho"}).id


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"{broken", "not valid JSON"),
        (b'{"prompt": "caf\xe9"}', "is not UTF-8"),
        ([1], "not a JSON object"),
        ({"text": "x"}, "no prompt in it"),
        ({"prompt": "  "}, "empty"),
        ({"turns": []}, "empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not text"),
        ({"messages": [{"role": "system", "content": "x"}]}, "empty"),
        ({"id": "a", "prompt": "other"}, "was used before"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_kept(
    record: Any, reason: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "p.jsonl", {"id": "a", "prompt": "x"}, record, {"prompt": "y"})
    found = read_prompts(str(file))
    assert [c.turns for c in found.good] == [("x",), ("y",)]
    (bad,) = found.bad
    assert bad.where == "p.jsonl:2"
    assert reason in bad.error


def test_folders_are_read_in_order_and_repeats_once(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl.gz", {"prompt": "3"}, {"prompt": "1"})
    write(tmp_path / "a.jsonl", {"prompt": "1"}, {"prompt": "2"})
    (tmp_path / "readme.txt").write_text("no prompts")
    found = read_prompts(str(tmp_path))
    assert [c.turns[0] for c in found.good] == ["1", "2", "3"]
    assert found.num_repeated == 1
    assert len(read_prompts(str(tmp_path), limit=2).good) == 2


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prompts at"):
        read_prompts(str(tmp_path / "missing.jsonl"))
    with pytest.raises(DataError, match=r"holds no \.jsonl"):
        read_prompts(str(tmp_path))
    empty = write(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="holds no prompt"):
        read_prompts(str(empty))
    with pytest.raises(DataError, match=r"bad\.jsonl:1: not valid JSON"):
        read_prompts(str(write(tmp_path / "bad.jsonl", b"{")))


def test_a_cut_gzip_file_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl.gz", *({"prompt": f"{n} {n * n}"} for n in range(500)))
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(DataError, match="cannot read"):
        read_prompts(str(file))


def test_a_hub_dataset_is_read_by_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((args, options))
        return [{"messages": [{"role": "user", "content": "Hi"}]}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_prompts("org/name:part", split="test").good[0].turns == ("Hi",)
    assert asked == [(("org/name", "part"), {"split": "test", "streaming": True})]


def test_without_the_datasets_library_the_hint_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError) as caught:
        read_prompts("org/name")
    assert "pip install datasets" in str(caught.value.hint)
