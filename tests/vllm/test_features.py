"""Real vLLM on the real small target: its states are ours, and a step on them has our loss."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.checkpoints.targets import load_target
from peagle.data.dataset import DatasetWriter, Row
from peagle.data.packing import pack
from peagle.errors import DataError
from peagle.teacher_forcing.features import OnlineFeatures
from peagle.train.features.vllm_features import VllmFeatures
from peagle.train.recipe import Recipe, recipe_from
from peagle.train.setup import Setup, build
from tests.tolerance import rounding

pytestmark = [pytest.mark.vllm, pytest.mark.network, pytest.mark.slow]

MODEL = "smollm2-135m"
AUX_LAYERS = (2, 15, 27)
# Float32 on both sides, other kernels; a wrong layer or token is off by more than 0.1.
ROUNDING = rounding(terms=1536, depth=30)
TEXTS = (
    "A sparrow hopped along the wall of the garden, looked at the cat, and thought better of it. "
    * 9,
    "The tide comes in twice a day, and twice a day it takes the children's castles with it.",
)
# Fewer tokens a step than the first document has: its prefill comes in chunks.
ARGS = ["--enforce-eager", "--max-num-batched-tokens=64", "--max-num-seqs=8"]


def recipe(folder: Path, features: str | None) -> Recipe:
    options: dict[str, dict[str, Any]] = {
        "target": {"model": MODEL},
        "head": {"num_hidden_layers": 1, "aux_hidden_state_layer_ids": list(AUX_LAYERS)},
        "data": {
            "path": str(folder / "data"),
            "features": features,
            "tokens_per_row": 256,
            "held_out_share": 0.0,
        },
        "vllm": {
            # `vllm serve` fails in the CPU build: it asks for the version of a package `vllm`.
            "command": f"{sys.executable} -m vllm.entrypoints.openai.api_server --model",
            "args": ARGS,
            "requests": 4,
        },
        "schedule": {"steps": 1},
        "loss": {"chunk_rows": 256},
        "run": {"folder": str(folder / "run"), "device": "cpu"},
    }
    return recipe_from(options)


def write_dataset(folder: Path) -> None:
    tokenizer: Any = load_tokenizer(resolve_model(MODEL))
    writer = DatasetWriter(folder, {"target": MODEL}, rows_per_shard=16)
    for number, text in enumerate(TEXTS):
        tokens = torch.tensor(tokenizer(text)["input_ids"])
        writer.add(Row(f"row-{number}", tokens, (torch.arange(len(tokens)) >= 5).int()))
    writer.flush()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Setup, Path]]:
    """A run set up with a vLLM server of its own."""
    folder = tmp_path_factory.mktemp("served")
    write_dataset(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        setup = build(recipe(folder, "vllm"))
    yield setup, folder
    source = setup.trainer.source
    assert isinstance(source, VllmFeatures)
    source.close()


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_aux_hidden_states_and_final_states_of_a_packed_row_are_the_targets(
    served: tuple[Setup, Path],
) -> None:
    setup, _ = served
    row = pack(setup.dataset, [0, 1], 256)
    used = int(setup.dataset.lengths.sum())
    assert setup.dataset.lengths[0] > 2 * 64
    source = setup.trainer.source
    ours = source(row, source.fetch(row))
    target = load_target(resolve_model(MODEL), dtype=torch.float32, device=torch.device("cpu"))
    theirs = OnlineFeatures(target, AUX_LAYERS)(row)
    assert torch.equal(ours.next_tokens, theirs.next_tokens)
    assert relative_error(ours.aux_hidden_states[:used], theirs.aux_hidden_states[:used]) < ROUNDING
    assert relative_error(ours.states[:used], theirs.states[:used]) < ROUNDING
    worst = (ours.states[:used] - theirs.states[:used]).norm(dim=1) / theirs.states[:used].norm(
        dim=1
    )
    assert float(worst.max()) < ROUNDING  # for no token lost between two chunks


def test_one_step_has_the_loss_that_the_target_in_process_gives(
    served: tuple[Setup, Path],
) -> None:
    setup, folder = served
    losses = []
    for chosen in (setup, build(recipe(folder, None))):
        chosen.trainer.step([next(chosen.batches.rows_from(0))], 1e-4)
        metrics = chosen.trainer.take_metrics()
        losses.append((metrics.loss, metrics.gradient_norm))
    assert losses[0] == pytest.approx(losses[1], rel=ROUNDING)


def test_the_trainer_holds_no_layer_of_the_target_and_no_file_stays(
    served: tuple[Setup, Path],
) -> None:
    setup, _ = served
    source = setup.trainer.source
    assert isinstance(source, VllmFeatures)
    assert len(setup.target.layers) == 0
    row = pack(setup.dataset, [1], 64)
    answer = source.client._ask(row.token_ids[:5].tolist())
    path = source.client._path(answer)
    list(map(source.client, [row.token_ids[:5], row.token_ids[:7]]))
    left = {file.name for file in path.parent.iterdir()}
    assert left <= {path.name, path.name + ".lock"}


def test_a_document_that_does_not_fit_is_refused_with_vllms_reason(
    served: tuple[Setup, Path],
) -> None:
    setup, _ = served
    source = setup.trainer.source
    assert isinstance(source, VllmFeatures)
    with pytest.raises(DataError, match="refused a document of 2000 tokens"):
        source.client(torch.arange(2000))


def test_states_are_wrong_if_one_token_differs(served: tuple[Setup, Path]) -> None:
    """The tolerance above can fail: one changed token moves all states after it."""
    setup, _ = served
    source = setup.trainer.source
    row = pack(setup.dataset, [1], 64)
    changed = row._replace(token_ids=row.token_ids.clone())
    changed.token_ids[3] += 1
    ours, theirs = (source(r, source.fetch(r)) for r in (row, changed))
    assert relative_error(ours.states[10:20], theirs.states[10:20]) > 1e-2
