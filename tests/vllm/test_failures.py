"""What cannot run is said in one line, with vLLM's own words where it was vLLM that refused."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from peagle.backends.vllm.backend import VllmBackend
from peagle.backends.vllm.options import VllmOptions
from peagle.checkpoints.heads.references import resolve_head
from peagle.config import EngineConfig
from peagle.errors import BackendError, ConfigError, HeadError
from tests.vllm.interop import vllm
from tests.vllm.released_head import CONTEXT, write_released_head, write_target

pytestmark = pytest.mark.vllm

TINY = EngineConfig(dtype="float32", max_model_len=CONTEXT, max_num_seqs=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("target")))


def test_more_drafts_than_the_head_was_trained_for_are_refused(target: str) -> None:
    with (
        pytest.raises(ConfigError, match="num_speculative_tokens=60"),
        vllm("smollm2-135m", "smollm2-135m-p-eagle", 60),
    ):
        pass


def test_a_head_for_another_target_is_refused(target: str) -> None:
    shipped = str(resolve_head("smollm2-135m-p-eagle"))
    with pytest.raises(HeadError, match="hidden size"), vllm(target, shipped, 3, TINY):
        pass


def test_vllms_own_words_come_along_when_it_dies_at_start(
    target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    too_long = EngineConfig(dtype="float32", max_model_len=CONTEXT * 9)
    with pytest.raises(BackendError) as caught, vllm(target, None, 0, too_long):
        pass
    assert caught.value.message.startswith("vLLM did not start: ")
    assert "max_model_len" in caught.value.message
    assert "\n" not in caught.value.message
    assert not multiprocessing.active_children()
    assert capfd.readouterr().out == ""


def test_vllms_words_cross_from_its_processes(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With worker processes the error is raised elsewhere; ours would only say that it was."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    nothing = VllmOptions(enforce_eager=True, kv_cache_memory_bytes=1)
    with pytest.raises(BackendError) as caught:
        VllmBackend(target, TINY, None, nothing)
    assert "cache" in caught.value.message
    assert not multiprocessing.active_children()


def test_a_head_with_a_missing_tensor_is_refused(target: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    head = write_released_head(tmp_path / "head", Path(target))
    tensors = load_file(head / "model.safetensors")
    del tensors["layers.2.mlp.up_proj.weight"]
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(HeadError, match="lacks"), vllm(target, str(head), 3, TINY):
        pass


def test_the_same_process_can_start_again_after_a_failure(target: str) -> None:
    too_long = EngineConfig(dtype="float32", max_model_len=CONTEXT * 9)
    with pytest.raises(BackendError), vllm(target, None, 0, too_long):
        pass
    with vllm(target, None, 0, TINY) as backend:
        (output,) = backend.generate("abc")
    assert output.finished
    assert output.stats.num_drafts == 0
