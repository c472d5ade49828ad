"""prepare, capture, train and bench, stopped at random moments and begun again: the same result.

Signals meet forked processes, which need not import torch again. PEAGLE_SOAK=30 tries that many
moments of each verb.
"""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peagle.bench.results.document import load_results
from peagle.bench.results.store import Store, run_name
from peagle.checkpoints.references import load_config
from peagle.cli.main import main
from peagle.data.dataset import Dataset
from peagle.processes import raise_interruption
from peagle.train.features.capture import read_index
from peagle.train.journal import read_metrics

from .conftest import PREPARE

MOMENTS = int(os.environ.get("PEAGLE_SOAK", "4"))
CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
FORK = multiprocessing.get_context("fork")
Tensors = dict[str, torch.Tensor]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def imported(model: str) -> None:
    """What each process would import for itself, for seconds."""
    modules = ("bench.run.bench", "engine.llm", "train.loop")
    for name in ("pydantic", "rich.console", *(f"peagle.{module}" for module in modules)):
        importlib.import_module(name)
    load_config(Path(model))  # transformers


def _command(args: list[str], log: Path, ready: Event) -> None:
    """The process of one command line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, raise_interruption)
    sys.stdout = sys.stderr = log.open("a", encoding="utf-8")
    torch.set_num_threads(1)
    ready.set()
    code = main(args)
    sys.stderr.flush()
    os._exit(code)


def run(args: list[str], log: Path, number: int | None = None, seconds: float = 300.0) -> int:
    """-> exit code; after `seconds` the signal is sent."""
    ready = FORK.Event()
    process = FORK.Process(target=_command, args=(args, log, ready))
    process.start()
    assert ready.wait(60)
    process.join(seconds)
    if process.is_alive() and number is not None:
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(120)
    assert process.exitcode is not None, f"{args[0]} did not end: {log.read_text()}"
    return process.exitcode


def check_soak(
    line: Callable[[Path], list[str]], folder: Path, check: Callable[[Path], Any]
) -> None:
    """`line` makes the command for an output folder, and `check` reads what it left there."""
    log, outs = folder / "log", [folder / "out-0"]
    began = time.monotonic()
    assert run(line(folder / "whole"), log) == 0, log.read_text()
    longest, moments = time.monotonic() - began, random.Random(MOMENTS)
    for number in itertools.islice(itertools.cycle(CODES), MOMENTS):
        code = run(line(outs[-1]), log, number, moments.uniform(0.0, longest))
        assert code in (0, CODES[number]), log.read_text()
        if code == 0:
            outs.append(folder / f"out-{len(outs)}")
    assert run(line(outs[-1]), log) == 0, log.read_text()
    text = log.read_text()
    assert "Traceback" not in text
    assert "unexpected" not in text
    expected = check(folder / "whole")
    for found in map(check, outs):
        assert expected.keys() == found.keys()
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def rows(folder: Path) -> Tensors:
    dataset = Dataset(folder)
    assert len({row["id"] for row in dataset.info}) == len(dataset)
    found = (dataset[index] for index in range(len(dataset)))
    return {
        row.id: torch.stack([as_tensor(row.token_ids), as_tensor(row.loss_mask)]) for row in found
    }


def as_tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).int()


def test_prepare_makes_the_same_rows(model: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": f"p{n}", "turns": [f"say {n}", "and?"]}) for n in range(24)]
    prompts.write_text("\n".join(lines))
    options = ["--model", model, "--prompts", str(prompts), "--max-num-seqs", "2"]
    check_soak(lambda out: [*PREPARE, *options, "--out", str(out)], tmp_path, rows)


def states(folder: Path) -> Tensors:
    """Each row's states by its id."""
    found: Tensors = {}
    for shard in read_index(folder)["shards"]:
        tensors = load_file(folder / shard["name"])
        for name in ("states", "aux_hidden_states"):
            parts = tensors[name].split(shard["lengths"])
            ids = [f"{row}/{name}" for row in shard["rows"]]
            assert not found.keys() & ids
            found |= dict(zip(ids, parts, strict=True))
    return found


def test_capture_stores_the_same_states(
    model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = int(Dataset(Path(data)).lengths.max())
    monkeypatch.setattr("peagle.cli.capture.TOKENS_PER_PASS", longest)  # a row each
    options = [data, "--model", model, "--device", "cpu"]
    check_soak(lambda out: ["capture", *options, "--out", str(out)], tmp_path, states)


def head_and_checkpoint(folder: Path) -> Tensors:
    steps = [line["step"] for line in read_metrics(folder) if line["kind"] == "evaluate"]
    assert steps == [3, 6, 9, 12]
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    names = ("network.safetensors", "optimizer.safetensors")
    files = {f"{newest.name}/{name}": load_file(newest / name) for name in names}
    files["head"] = load_file(folder / "head" / "model.safetensors")
    return {
        f"{file}/{name}": value for file, inside in files.items() for name, value in inside.items()
    }


def test_train_ends_with_the_same_head(
    model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "PEAGLE_SOAK" not in os.environ:  # drawing takes longer than all the rest
        monkeypatch.setattr("peagle.train.journal.draw_curves", lambda *_: None)
    options: dict[str, Any] = {
        "target": {"model": model},
        "head": {"num_hidden_layers": 2, "max_speculative_tokens": 3, "num_speculative_tokens": 2},
        "data": {"path": data, "tokens_per_row": 96, "held_out_share": 0.2},
        "optimizer": {"learning_rate": 1e-2},
        "loss": {"chunk_rows": 64},
        "schedule": {"steps": 12},
        "run": {"device": "cpu", "log_every": 3, "checkpoint_every": 2, "evaluate_every": 3},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(options))

    def line(out: Path) -> list[str]:
        begun = any((out / "checkpoints").glob("step-*"))
        return ["train", str(recipe), f"run.folder={out}", *(["--resume"] if begun else [])]

    check_soak(line, tmp_path, head_and_checkpoint)


def answers_and_counts(folder: Path) -> Tensors:
    """What does not depend on the clock: which runs there are, what was answered and accepted."""
    results = load_results(folder)
    assert not results.partial
    assert results.lossless is not None
    compared = results.lossless
    found = {"lossless": torch.tensor([compared.compared, compared.different])}
    for file in Store(folder).load_all():
        name = run_name(file.cell, file.repeat)
        counts = [file.run.stats[key] for key in ("num_drafts", "num_accepted_tokens")]
        found[name] = torch.tensor([file.run.num_requests, file.run.num_output_tokens, *counts])
        for answer in file.answers:
            found[f"{name}/{answer.prompt}"] = torch.tensor(answer.token_ids)
        for sample in file.samples:
            drafted = [token.drafted for token in sample.tokens]
            found[f"{name}/{sample.prompt}/drafted"] = torch.tensor(drafted)
    return found


def test_bench_measures_the_same_answers(
    model: str, head: str, prompts: str, tmp_path: Path
) -> None:
    grid = ["--spec-model", head, "--spec-tokens", "2", "--concurrency", "1,2"]
    work = ["--workload", prompts, "--num-prompts", "3", "--max-tokens", "8", "--repeats", "2"]
    options = [model, "--device", "cpu", *grid, *work]
    check_soak(lambda out: ["bench", *options, "--out", str(out)], tmp_path, answers_and_counts)
