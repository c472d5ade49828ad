"""From short prompts to a head that has seen long conversations, by the shipped files."""

from __future__ import annotations

import gzip
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from peagle.data.dataset import Dataset, is_held_out
from peagle.train.journal import read_metrics
from tests.tiny.folders import write_head, write_model

from .conftest import PREPARE
from .fakes import Shell

RECIPES = Path(__file__).parents[2] / "recipes"
CONTEXT, MAX_TOKENS, SHARE = 512, 24, 0.3


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prompts that say their ids; one has two turns, and one is longer than the context."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records: list[dict[str, Any]] = [{"id": f"p{n}", "prompt": f"what is p{n}?"} for n in range(60)]
    records[5] = {"id": "p5", "turns": ["what is p5?", "and who is p5?"]}
    records[6]["prompt"] += "!" * CONTEXT
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def make(out: Path, model: str, prompts: str, *options: str) -> list[dict[str, Any]]:
    lengths = ("--shortest", "100", "--max-tokens", str(MAX_TOKENS))
    arguments = [model, prompts, str(out), *lengths, "--held-out-share", str(SHARE), *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["long_prompts.py", *arguments])
        runpy.run_path(str(RECIPES / "long_prompts.py"), run_name="__main__")
    return [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]


def test_every_prompt_is_used_once_and_on_its_own_side(
    long_model: str, short: str, tmp_path: Path
) -> None:
    rows = make(tmp_path / "a.jsonl.gz", long_model, short)
    sides, seen = set(), []
    for row in rows:
        names = re.findall(r"what is (p\d+)", " ".join(row["turns"]))
        seen += names
        assert row["id"] in names
        assert len({is_held_out(name, SHARE) for name in names}) == 1
        sides.add(is_held_out(row["id"], SHARE))
    assert sorted(seen) == sorted({f"p{n}" for n in range(60)} - {"p6"})
    assert sides == {False, True}
    assert any(row["turns"][0].startswith("Read these texts") for row in rows)
    assert max(len(row["turns"]) for row in rows) > 3


def test_the_seed_decides_and_nothing_else(long_model: str, short: str, tmp_path: Path) -> None:
    seeds = {"a": "1", "b": "1", "c": "2"}
    for name, seed in seeds.items():
        make(tmp_path / name, long_model, short, "--seed", seed)
    first, again, other = ((tmp_path / name).read_bytes() for name in seeds)
    assert first == again != other


def test_mistakes_are_one_line_and_leave_no_file(long_model: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: no prompts at /missing\.jsonl\nhint: "):
        make(tmp_path / "a", long_model, "/missing.jsonl")
    for lengths in (("--shortest", "0"), ("--shortest", "600"), ("--longest", "9")):
        with pytest.raises(SystemExit, match="error: --shortest"):
            make(tmp_path / "a", long_model, "/missing.jsonl", *lengths)
    assert not list(tmp_path.iterdir())


def test_a_head_goes_on_with_long_conversations(
    command: Shell, long_model: str, short: str, data: str, tmp_path: Path
) -> None:
    rows = make(tmp_path / "long.jsonl.gz", long_model, short)
    long = str(tmp_path / "long")
    arguments = ("--model", long_model, "--prompts", str(tmp_path / "long.jsonl.gz"))
    assert command(*PREPARE, *arguments, "--out", long, "--json") == 0
    # Random bytes are no text: sent back as such they may take more tokens than planned.
    assert (command.json["failed"], command.json["skipped_too_long"] <= 2) == (0, True)
    lengths = Dataset(Path(long)).lengths
    assert len(rows) <= len(lengths)
    assert CONTEXT // 2 < int(lengths.max()) <= CONTEXT

    sizes = {"max_position_embeddings": CONTEXT, "sliding_window": 16}
    head = write_head(tmp_path / "head", Path(long_model), **sizes)
    overrides = {
        "target.model": long_model,
        "head.start_from": head,
        "head.num_hidden_layers": 1,
        "head.max_speculative_tokens": 4,
        "head.num_speculative_tokens": 3,
        "head.aux_hidden_state_layer_ids": "[2, 3, 3]",
        "head.draft_vocab_size": "null",
        "head.sliding_window": 16,
        "data.path": long,
        "data.more": f"[{data}]",
        "data.tokens_per_row": CONTEXT,
        "data.held_out_share": SHARE,
        "schedule.steps": 2,
        "run.folder": tmp_path / "run",
        "run.device": "cpu",
        "run.partitions": 2,
        "run.evaluate_rows": 2,
        "run.log_every": 1,
    }
    changes = [f"{key}={value}" for key, value in overrides.items()]
    assert (
        command("train", str(RECIPES / "smollm2-135m-p-eagle-long.yaml"), "--json", *changes) == 0
    )
    assert command.json["step"] == 2
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    assert len(losses) == 2
    assert all(loss > 0 for loss in losses)
