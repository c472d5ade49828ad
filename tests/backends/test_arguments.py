"""What vLLM's engine is started with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.backends.vllm.arguments import engine_arguments
from peagle.backends.vllm.options import VllmOptions
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.errors import ConfigError, HeadError
from tests.tiny.folders import write_head, write_model

ENGINE = EngineConfig(dtype="float32", max_model_len=128, max_num_seqs=8, seed=3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def head(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("heads") / "p-eagle"
    layers = {"aux_hidden_state_layer_ids": (2, 3, 4), "mask_token_id": 200}
    return str(write_head(folder, Path(model), **layers))


def drafter(head: str, k: int | None = 3) -> SpeculativeConfig:
    return SpeculativeConfig(model=head, num_speculative_tokens=k)


def test_a_plain_target_gets_the_engines_sizes(model: str) -> None:
    arguments = engine_arguments(model, ENGINE, None, VllmOptions(tensor_parallel_size=2))
    assert arguments.method == "none"
    assert arguments.num_speculative_tokens == 0
    assert arguments.keywords["model"] == model
    expected = {
        "dtype": "float32",
        "seed": 3,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "tensor_parallel_size": 2,
    }
    assert expected.items() <= arguments.keywords.items()
    assert "speculative_config" not in arguments.keywords
    # Defaults of the embedded engine are its own.
    assert not {"block_size", "max_num_batched_tokens"} & set(arguments.keywords)


def test_a_native_head_is_exported_once_into_the_cache(model: str, head: str, cache: Path) -> None:
    first = engine_arguments(model, ENGINE, drafter(head), VllmOptions())
    folder = Path(first.keywords["speculative_config"]["model"])
    assert folder.parent == cache / "exports"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    written = (folder / "config.json").stat().st_mtime_ns
    again = engine_arguments(model, ENGINE, drafter(head), VllmOptions())
    assert again.keywords == first.keywords
    assert (folder / "config.json").stat().st_mtime_ns == written


def test_p_eagle_is_eagle3_with_parallel_drafting_and_graphs_that_fit(
    model: str, head: str
) -> None:
    arguments = engine_arguments(model, ENGINE, drafter(head), VllmOptions())
    config = arguments.keywords["speculative_config"]
    assert (config["method"], config["parallel_drafting"]) == ("eagle3", True)
    assert config["num_speculative_tokens"] == 3
    assert arguments.method == "p-eagle"
    assert arguments.keywords["max_cudagraph_capture_size"] == 2 * 3 * 8
    assert arguments.keywords["per_request_spec_decode_metrics"] == "detailed"


def test_a_steps_budget_holds_every_requests_drafter_rows(model: str, head: str) -> None:
    small = EngineConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=16)
    arguments = engine_arguments(model, small, drafter(head), VllmOptions())
    assert arguments.keywords["max_num_batched_tokens"] == 2 * 3 * 8


def test_k_above_the_heads_depth_is_refused(model: str, head: str) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens=5"):
        engine_arguments(model, ENGINE, drafter(head, 5), VllmOptions())


def test_without_k_the_heads_advice_is_taken(model: str, head: str) -> None:
    assert (
        engine_arguments(model, ENGINE, drafter(head, None), VllmOptions()).keywords[
            "speculative_config"
        ]["num_speculative_tokens"]
        == 3
    )


def test_ngram_needs_no_head(model: str) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3)
    arguments = engine_arguments(model, ENGINE, config, VllmOptions())
    assert arguments.keywords["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
    assert arguments.method == "ngram"


@pytest.mark.parametrize(
    ("engine", "options", "named"),
    [
        (EngineConfig(device="cuda"), VllmOptions(), "device"),
        (ENGINE, VllmOptions(data_parallel_size=2), "data_parallel_size=2"),
    ],
)
def test_what_an_engine_in_this_process_cannot_do_is_refused(
    model: str, engine: EngineConfig, options: VllmOptions, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        engine_arguments(model, engine, None, options)


def test_a_head_in_vllms_layout_is_checked_for_missing_tensors(
    model: str, head: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    from peagle.checkpoints.heads.exporting import export_head

    export_head(head, model, tmp_path / "out", "vllm")
    file = tmp_path / "out" / "model.safetensors"
    assert engine_arguments(model, ENGINE, drafter(str(file.parent)), VllmOptions()).method == (
        "p-eagle"
    )
    tensors = load_file(file)
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(HeadError, match=r"lacks layers\.0\.mlp\.up_proj\.weight"):
        engine_arguments(model, ENGINE, drafter(str(file.parent)), VllmOptions())


def test_memory_and_quantization_of_the_engines_config_reach_vllm(model: str) -> None:
    asked = {
        "quantization": "fp8",
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 1 << 20,
    }
    engine = EngineConfig(**asked)  # type: ignore[arg-type]
    keywords = engine_arguments(model, engine, None, VllmOptions()).keywords
    assert {name: keywords[name] for name in asked} == asked
    assert not set(asked) & set(engine_arguments(model, ENGINE, None, VllmOptions()).keywords)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "max_num_seqs", "block_size"])
def test_sizes_are_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0"):
        VllmOptions(**{name: 0})


def test_a_share_of_memory_is_a_share() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=1\.5"):
        VllmOptions(gpu_memory_utilization=1.5)
