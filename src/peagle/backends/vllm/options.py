"""Options of vLLM's engine under vLLM's names: sizes, quantization, memory, graphs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from peagle.config import Doc
from peagle.errors import ConfigError

SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_cudagraph_capture_size",
    "block_size",
    "kv_cache_memory_bytes",
    "stream_interval",
)


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """None leaves the choice to vLLM. Fields without a Doc mean what they mean in EngineConfig."""

    tensor_parallel_size: Annotated[int | None, Doc("GPUs that each layer is split across.")] = None
    pipeline_parallel_size: Annotated[
        int | None, Doc("Groups of GPUs that the layers are divided among.")
    ] = None
    data_parallel_size: Annotated[
        int | None, Doc("Copies of the model; more than one only with peagle serve.")
    ] = None
    dtype: str | None = None
    quantization: Annotated[str | None, Doc("fp8, awq, gptq ...")] = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: Annotated[str | None, Doc("auto, fp8 ...")] = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    disable_hybrid_kv_cache_manager: Annotated[
        bool | None,
        Doc("One block table for all layers; on where only the head has a sliding window."),
    ] = None
    enforce_eager: Annotated[bool | None, Doc("Run without CUDA graphs.")] = None
    max_cudagraph_capture_size: Annotated[
        int | None, Doc("Rows of the largest graph; P-EAGLE: 2 K x --max-num-seqs.")
    ] = None  # None: what a P-EAGLE step needs
    async_scheduling: Annotated[bool | None, Doc("Schedule while the GPU computes.")] = None
    stream_interval: Annotated[int | None, Doc("Tokens per streamed chunk.")] = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is out of range", hint="use >= 1")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={share} is out of range", hint="use a share in (0, 1]"
            )

    def given(self) -> dict[str, Any]:
        """What somebody asked for."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in pairs if value is not None}

    @property
    def world_size(self) -> int:
        """Processes that hold one copy of the model."""
        return (self.tensor_parallel_size or 1) * (self.pipeline_parallel_size or 1)
