"""`--backend`: which engine a verb gets, and flags that only one of them knows."""

from __future__ import annotations

from dataclasses import fields

import pytest

from peagle.backends.vllm import backend
from peagle.backends.vllm.options import VllmOptions
from peagle.cli.flags.vllm import BackendFlags
from peagle.config import EngineConfig, SpeculativeConfig

from .fakes import FakeLLM, Shell


@pytest.fixture
def vllm(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> list[VllmOptions]:
    """The options that vLLM was started with; a fake answers in its place."""
    started: list[VllmOptions] = []

    def build(
        model: str,
        engine: EngineConfig,
        drafter: SpeculativeConfig | None,
        options: VllmOptions,
    ) -> FakeLLM:
        started.append(options)
        shell.engines.append(FakeLLM(model, engine, drafter))
        return shell.engines[-1]

    monkeypatch.setattr(backend, "VllmBackend", build)
    return started


def test_flags_are_named_as_vllms_options() -> None:
    flags = {flag.name for flag in BackendFlags.parameters()} - {"backend"}
    assert flags <= {field.name for field in fields(VllmOptions)}


def test_the_embedded_engine_is_the_default(shell: Shell, vllm: list[VllmOptions]) -> None:
    assert shell("generate", "m", "Hi") == 0
    assert not vllm
    assert shell.llm.closed


def test_vllm_gets_its_flags_and_those_of_both(shell: Shell, vllm: list[VllmOptions]) -> None:
    flags = (
        "--backend vllm --tensor-parallel-size 2 --quantization awq --gpu-memory-utilization 0.8 "
        "--enforce-eager --no-enable-prefix-caching --block-size 32 --max-num-seqs 4"
    )
    assert shell("generate", "m", "Hi", *flags.split()) == 0
    assert vllm == [
        VllmOptions(
            tensor_parallel_size=2,
            quantization="awq",  # the embedded engine does not know it
            gpu_memory_utilization=0.8,
            enforce_eager=True,
            enable_prefix_caching=False,
            block_size=32,
            max_num_seqs=4,
        )
    ]
    given = EngineConfig(
        max_num_seqs=4, block_size=32, gpu_memory_utilization=0.8, enable_prefix_caching=False
    )
    assert shell.llm.config == given
    assert shell.llm.closed


def test_what_is_not_given_is_left_to_vllm(shell: Shell, vllm: list[VllmOptions]) -> None:
    assert shell("generate", "m", "Hi", "--backend", "vllm") == 0
    assert vllm == [VllmOptions()]


@pytest.mark.parametrize(
    "flags", ["--tensor-parallel-size 2", "--kv-cache-dtype fp8", "--pipeline-parallel-size 2"]
)
@pytest.mark.parametrize("verb", ["generate m Hi", "prepare --model m --prompts p --out o"])
def test_the_embedded_engine_refuses_vllms_flags_by_name(
    shell: Shell, verb: str, flags: str
) -> None:
    assert shell(*verb.split(), *flags.split()) == 2
    assert f"error: {flags.split()[0]} " in shell.err
    assert " is not supported: " in shell.err
    assert "--backend vllm" in shell.err
    assert not shell.engines


@pytest.mark.parametrize("flags", ["--tensor-parallel-size 1", "--enforce-eager"])
def test_the_embedded_engine_takes_those_that_change_nothing(shell: Shell, flags: str) -> None:
    assert shell("generate", "m", "Hi", *flags.split()) == 0


def test_prepare_takes_an_endpoint_or_a_backend(shell: Shell) -> None:
    line = "prepare --model m --prompts p --out o --endpoint http://h:1 --backend vllm"
    assert shell(*line.split()) == 2
    assert "--endpoint and --backend vllm were both given" in shell.err


def test_without_vllm_one_line_says_how_to_get_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "check_installed", _missing)
    assert shell("generate", "smollm2-135m", "Hi", "--backend", "vllm") == 2
    assert shell.err.splitlines() == ["error: vLLM is not installed", "hint: pip install it"]


def _missing() -> None:
    from peagle.errors import BackendError

    raise BackendError("vLLM is not installed", hint="pip install it")
