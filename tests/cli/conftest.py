"""A fake engine behind the one seam the verbs use, so that the command line is tested alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.cli import engines
from peagle.cli.main import main
from peagle.config import EngineConfig, SpeculativeConfig
from tests.tiny.folders import write_head, write_model

from .fakes import FakeLLM, Shell


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    made = Shell(capsys, [])

    def build(model: str, engine: EngineConfig, drafter: SpeculativeConfig | None) -> FakeLLM:
        made.engines.append(made.make(model, engine, drafter))
        return made.engines[-1]

    monkeypatch.setattr(engines, "build_llm", build)
    monkeypatch.delenv("PEAGLE_DEBUG", raising=False)
    return made


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Command lines with the real engine, on the tiny model."""
    monkeypatch.delenv("PEAGLE_DEBUG", raising=False)
    return Shell(capsys, [])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def head(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_head(tmp_path_factory.mktemp("heads") / "p-eagle", Path(model)))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [{"id": f"p{n}", "prompt": f"say {n}", "category": "ab"[n % 2]} for n in range(8)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.fixture(scope="session")
def data(model: str, prompts: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("data") / "prepared")
    assert main([*PREPARE, "--model", model, "--prompts", prompts, "--out", folder]) == 0
    return folder


PREPARE = ("prepare", "--max-tokens", "24", "--cut-loops", "-1", "--device", "cpu")
