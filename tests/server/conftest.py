"""A tiny model whose template knows tools, a head for it, and servers of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from peagle.engine.llm import LLM
from tests.tiny.folders import CHAT_TEMPLATE, write_head, write_model

from .running import RunningServer, running_server

TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} answer with <tool_call>{% endif %}"
    "{% if quiet %}quiet{% endif %}{{ reasoning_effort or '' }}" + CHAT_TEMPLATE
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 512}
    return write_model(tmp_path_factory.mktemp("models") / "tiny", TOOLS_TEMPLATE, **sizes)


@pytest.fixture(scope="session")
def head_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "aux_hidden_state_layer_ids": (0, 1, 2)}
    folder = tmp_path_factory.mktemp("heads") / "p-eagle"
    return write_head(folder, model_folder, max_speculative_tokens=6, **sizes)


def make_llm(model: Path, head: Path, nodes: int | None = None, **options: object) -> LLM:
    return LLM(
        str(model),
        device="cpu",
        dtype="float32",
        speculative_config={
            "model": str(head),
            "num_speculative_tokens": 4,
            **({} if nodes is None else {"num_draft_nodes": nodes}),
        },
        **{"max_num_seqs": 8, **options},
    )


@pytest.fixture(scope="session")
def server(model_folder: Path, head_folder: Path) -> Iterator[RunningServer]:
    with running_server(lambda: make_llm(model_folder, head_folder)) as running:
        yield running


@pytest.fixture(scope="session")
def alone(model_folder: Path) -> LLM:
    """The same target without a drafter and without HTTP: what answers have to equal."""
    return LLM(str(model_folder), device="cpu", dtype="float32", max_num_seqs=1)
