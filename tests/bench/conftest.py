"""A tiny model with a head, and a file of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny.folders import write_head, write_model


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """A tiny model gains nothing by a second, and on a busy machine two wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("bench-model")))


@pytest.fixture(scope="session")
def head(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_head(tmp_path_factory.mktemp("bench-heads") / "p-eagle", Path(model)))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("bench-prompts") / "two-turns.jsonl"
    records = [
        {"id": f"p{n}", "turns": [f"say {n}", "again"], "category": "ab"[n % 2]} for n in range(4)
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)
