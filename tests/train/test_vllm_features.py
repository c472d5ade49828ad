"""States that vLLM hands over train like the target's own, and never for other tokens."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.data.dataset import Dataset
from peagle.data.packing import PackedRow, pack
from peagle.errors import ConfigError, DataError, ModelError
from peagle.http import Endpoint
from peagle.models.target import TargetModel
from peagle.teacher_forcing.features import Features, OnlineFeatures
from peagle.train.features.vllm_client import StatesClient, read_states
from peagle.train.features.vllm_features import VllmFeatures, documents
from peagle.train.features.vllm_server import RequiredStates, connect, open_features
from peagle.train.loop import TrainingRun
from peagle.train.recipe import VllmSection
from peagle.train.setup import assemble
from tests.tiny import training
from tests.tiny.models import DEEP, ROPE
from tests.tolerance import rounding
from tests.train.states_server import FakeVllm, serving_states

AUX_LAYERS = (2, 3, 5)
LAYERS = (2, 3, 5, 6)


@contextlib.contextmanager
def source_of(
    fake: FakeVllm,
    aux_hidden_states: tuple[int, ...] = AUX_LAYERS,
    target: TargetModel | None = None,
) -> Iterator[VllmFeatures]:
    target = target or DEEP.make_target()
    client = StatesClient(Endpoint(fake.url, "tiny", retries=1, first_wait=0.0), fake.layer_ids)
    source = VllmFeatures(client, target, aux_hidden_states, num_requests=4)
    try:
        yield source
    finally:
        source.close()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeVllm]:
    with serving_states(FakeVllm(DEEP.make_target(), LAYERS, tmp_path / "states")) as serving:
        yield serving


def ask(source: VllmFeatures, row: PackedRow) -> Features:
    return source(row, source.fetch(row))


def assert_same_features(ours: Features, theirs: Features, used: int) -> None:
    assert torch.equal(ours.next_tokens, theirs.next_tokens)
    torch.testing.assert_close(ours.aux_hidden_states[:used], theirs.aux_hidden_states[:used])
    torch.testing.assert_close(ours.states[:used], theirs.states[:used])


def test_features_of_a_packed_row_are_those_of_the_target_in_process(fake: FakeVllm) -> None:
    row = training.packed([17, 1, 30], 64)
    with source_of(fake) as source:
        assert_same_features(
            ask(source, row), OnlineFeatures(DEEP.make_target(), AUX_LAYERS)(row), 48
        )
    assert sorted(len(prompt) for prompt in fake.prompts[1:]) == [1, 17, 30]


@pytest.mark.parametrize("aux_hidden_states", [(5, 2, 3), (6, 0, 3), (2, 2, 6)])
def test_aux_hidden_states_keep_the_heads_order_though_vllm_sorts_them(
    tmp_path: Path, aux_hidden_states: tuple[int, ...]
) -> None:
    layers = tuple(sorted({*aux_hidden_states, 6}))
    row = training.packed([9, 8], 17)
    online = OnlineFeatures(DEEP.make_target(), aux_hidden_states)(row)
    with (
        serving_states(FakeVllm(DEEP.make_target(), layers, tmp_path)) as fake,
        source_of(fake, aux_hidden_states) as source,
    ):
        assert_same_features(ask(source, row), online, 17)


def test_padding_is_asked_for_by_nobody_and_has_no_states(fake: FakeVllm) -> None:
    row = training.packed([5, 7], 40)
    assert list(documents(row)) == [slice(0, 5), slice(5, 12)]
    with source_of(fake) as source:
        features = ask(source, row)
    assert not features.aux_hidden_states[12:].any()
    assert not features.states[12:].any()


def test_the_next_row_is_asked_for_while_the_first_is_on_its_way(tmp_path: Path) -> None:
    with (
        serving_states(FakeVllm(DEEP.make_target(), LAYERS, tmp_path)) as fake,
        source_of(fake) as source,
    ):
        fake.open.clear()
        rows = [training.packed([5, 6], 16, seed=seed) for seed in (1, 2)]
        fetched = [source.fetch(row) for row in rows]
        wait_until(lambda: len(fake.prompts) == 1 + 4)  # the probe and all four documents
        fake.open.set()
        for row, states in zip(rows, fetched, strict=True):
            online = OnlineFeatures(DEEP.make_target(), AUX_LAYERS)(row)
            assert_same_features(source(row, states), online, 11)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_source_that_nobody_holds_leaves_no_thread(fake: FakeVllm) -> None:
    client = StatesClient(Endpoint(fake.url, "tiny"), LAYERS)
    source = VllmFeatures(client, DEEP.make_target(), AUX_LAYERS, num_requests=2)
    ask(source, training.packed([5, 7, 9], 32))
    threads = [t for t in threading.enumerate() if t.name.startswith("vllm-states")]
    assert len(threads) == 2
    del source
    wait_until(lambda: not any(thread.is_alive() for thread in threads))


def test_no_file_stays_behind(fake: FakeVllm) -> None:
    with source_of(fake) as source:
        ask(source, training.packed([5, 7, 9], 32))
        fake.changes = {"choices": []}  # an answer that cannot be used
        with pytest.raises(LookupError):
            ask(source, training.packed([5], 8))
    assert list(fake.folder.iterdir()) == []


def test_states_of_another_checkpoint_are_refused_before_training(fake: FakeVllm) -> None:
    with (
        pytest.raises(DataError, match="does not follow"),
        source_of(fake, target=DEEP.make_target(seed=1)),
    ):
        pass


def test_states_before_the_last_layer_are_not_taken_for_its(tmp_path: Path) -> None:
    """A server that stores layer 4 in the place of layer 6."""
    lying = FakeVllm(DEEP.make_target(), (2, 3, 4, 5), tmp_path)
    with serving_states(lying) as fake:
        client = StatesClient(Endpoint(fake.url, "tiny"), (2, 3, 4, 5))
        client.layer_ids = (2, 3, 5, 6)
        with pytest.raises(DataError, match="the head needs 'layers-2-3-5-6'"):
            VllmFeatures(client, DEEP.make_target(), AUX_LAYERS, num_requests=1)
        fake.root.joinpath("layers-2-3-5-6").symlink_to(fake.folder)
        renamed = RenamingClient(Endpoint(fake.url, "tiny"), (2, 3, 5, 6))
        with pytest.raises(DataError, match="does not follow"):
            VllmFeatures(renamed, DEEP.make_target(), AUX_LAYERS, num_requests=1)


class RenamingClient(StatesClient):
    """Believes a folder whose name is a lie."""

    def _path(self, answer: dict[str, Any]) -> Path:
        return Path(answer["kv_transfer_params"]["hidden_states_path"])


def test_a_server_without_extraction_is_named(fake: FakeVllm) -> None:
    fake.changes = {"kv_transfer_params": None}
    with pytest.raises(DataError, match="returns no hidden states"), source_of(fake):
        pass


def test_states_of_other_tokens_are_refused(fake: FakeVllm) -> None:
    with source_of(fake) as source:
        write = fake._write

        def shifted(path: Path, tensors: dict[str, torch.Tensor]) -> None:
            write(path, tensors | {"token_ids": tensors["token_ids"].roll(1)})

        fake._write = shifted  # type: ignore[method-assign]
        with pytest.raises(DataError, match="other tokens"):
            ask(source, training.packed([6], 8))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda h: h[:-1], "expected 6 tokens and 4 layers"),
        (lambda h: h[:, :3], "expected 6 tokens and 4 layers"),
        (lambda h: h[:, :, :8], "are 8 wide"),
    ],
    ids=["tokens", "layers", "width"],
)
def test_states_of_another_shape_are_refused(
    fake: FakeVllm, damage: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    with source_of(fake) as source:
        write = fake._write

        def cut(path: Path, tensors: dict[str, torch.Tensor]) -> None:
            write(path, tensors | {"hidden_states": damage(tensors["hidden_states"]).contiguous()})

        fake._write = cut  # type: ignore[method-assign]
        with pytest.raises(DataError, match=words):
            ask(source, training.packed([6], 8))


def test_a_file_that_is_not_there_is_named(fake: FakeVllm) -> None:
    with source_of(fake) as source:
        gone = fake.folder / "gone.safetensors"
        fake.changes = {"kv_transfer_params": {"hidden_states_path": str(gone)}}
        with pytest.raises(DataError, match=r"gone\.safetensors cannot be read"):
            ask(source, training.packed([6], 8))


def test_a_file_that_is_never_finished_is_given_up(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with (tmp_path / "a.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="not written within 0 s"):
            read_states(path, 0.05)
    assert read_states(path, 0.05).keys() == load_file(path).keys()


def test_a_refusal_and_a_dead_server_end_the_run_with_their_reason(fake: FakeVllm) -> None:
    with source_of(fake) as source:
        fake.status = 400
        with pytest.raises(DataError, match=r"refused a document of 6 tokens.*no room"):
            ask(source, training.packed([6], 8))
        fake.status = 500
        with pytest.raises(DataError, match="returned no hidden states: HTTP 500"):
            ask(source, training.packed([6], 8))

        def dead() -> None:
            raise ModelError("vLLM ended with 9")

        source.client.still_alive = dead
        with pytest.raises(ModelError, match="ended with 9"):
            ask(source, training.packed([6], 8))


def need(longest: int, aux_hidden_states: tuple[int, ...] = AUX_LAYERS) -> RequiredStates:
    return RequiredStates(
        "tiny", DEEP.make_target().config, aux_hidden_states, longest, torch.float64
    )


def test_a_server_too_short_for_the_longest_document_is_refused_at_once(fake: FakeVllm) -> None:
    section = VllmSection(endpoint=fake.url)
    fake.max_model_len = 30
    with pytest.raises(DataError, match="--max-model-len 31"):
        connect(section, need(30))
    assert connect(section, need(29)).layer_ids == LAYERS


def test_another_mount_of_the_servers_folder_is_found(fake: FakeVllm, tmp_path: Path) -> None:
    (tmp_path / "mount").symlink_to(fake.root)
    section = VllmSection(endpoint=fake.url, folder=str(tmp_path / "mount"), requests=2)
    source = open_features(section, need(20), DEEP.make_target(), tmp_path / "log")
    assert source.client.folder == tmp_path / "mount" / "layers-2-3-5-6"
    row = training.packed([7], 8)
    assert_same_features(ask(source, row), OnlineFeatures(DEEP.make_target(), AUX_LAYERS)(row), 7)
    source.close()


def test_every_document_of_a_dataset_comes_back_as_its_own(fake: FakeVllm, tmp_path: Path) -> None:
    training.write_dataset(tmp_path / "data", training.counting_language(12, 24))
    dataset = Dataset(tmp_path / "data")
    with source_of(fake) as source:
        rows = [pack(dataset, [i, 11 - i], 50) for i in range(6)]
        fetched = [source.fetch(row) for row in rows]
        online = OnlineFeatures(DEEP.make_target(), AUX_LAYERS)
        for row, states in zip(rows, fetched, strict=True):
            assert_same_features(source(row, states), online(row), 48)


def test_what_needs_the_targets_layers_is_refused_with_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which vLLM does not expose"):
        training.recipe(tmp_path, data={"features": "vllm"}, head={"copy_target_layers": True})


def test_several_processes_do_not_start_a_server_each(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must share one vLLM server"):
        open_features(VllmSection(), need(8), DEEP.make_target(), tmp_path / "log", world_size=2)


@pytest.mark.slow
def test_training_does_not_know_that_its_features_come_from_vllm(tmp_path: Path) -> None:
    training.write_dataset(tmp_path / "data", training.counting_language(20, 24))
    target = DEEP.make_target(torch.float32)
    trained: dict[bool, float] = {}
    with serving_states(FakeVllm(target, LAYERS, tmp_path)) as fake:
        for online in (True, False):
            recipe = training.recipe(
                tmp_path,
                data={"features": None if online else "vllm"},
                vllm={"endpoint": fake.url},
                run={"folder": str(tmp_path / f"run-{online}")},
            )
            setup = assemble(recipe, target, ROPE)
            TrainingRun(setup)()
            setup.trainer.step([next(setup.batches.rows_from(0))], 0.0)
            trained[online] = setup.trainer.take_metrics().loss
    assert trained[True] == pytest.approx(trained[False], rel=rounding(terms=32, depth=8))
