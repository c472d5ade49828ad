"""A tiny model with a head, and a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train.tiny_folder import write_head, write_model


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
