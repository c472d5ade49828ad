"""A tiny model on disk, with a tokenizer that splits characters, and heads for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle.engine.llm import LLM
from tests.tiny.folders import write_head, write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 160}
    return write_model(tmp_path_factory.mktemp("tiny-model"), **sizes)


@pytest.fixture(scope="session")
def head_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "aux_hidden_state_layer_ids": (0, 1, 2)}
    folder = tmp_path_factory.mktemp("heads") / "p-eagle"
    return write_head(folder, model_folder, max_speculative_tokens=6, **sizes)


@pytest.fixture(scope="session")
def plain_llm(model_folder: Path) -> LLM:
    return LLM(str(model_folder), device="cpu", dtype="float32", max_num_seqs=8)


@pytest.fixture(scope="session")
def spec_llm(model_folder: Path, head_folder: Path) -> LLM:
    return LLM(
        str(model_folder),
        device="cpu",
        dtype="float32",
        max_num_seqs=8,
        speculative_config={"model": str(head_folder), "num_speculative_tokens": 5},
    )


@pytest.fixture(scope="session")
def scripted_llm(model_folder: Path) -> LLM:
    """Its drafter is set by `use_drafter`."""
    return LLM(
        str(model_folder),
        device="cpu",
        dtype="float32",
        max_num_seqs=8,
        speculative_config={"method": "ngram", "num_speculative_tokens": 16},
    )
