"""vLLM's engine options as flags, under vLLM's names."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from peagle.backends.vllm.options import VllmOptions


def _vllm(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="vLLM", show_default=False)


@dataclass(frozen=True, kw_only=True)
class VllmFlags:
    """Field names are those of VllmOptions; what is not given keeps vLLM's default."""

    dtype: Annotated[str | None, _vllm("auto, float32, bfloat16 ...")] = None
    quantization: Annotated[str | None, _vllm("fp8, awq, gptq ...")] = None
    kv_cache_dtype: Annotated[str | None, _vllm("auto, fp8 ...")] = None
    max_model_len: Annotated[int | None, _vllm("Longest prompt and answer together.")] = None
    max_num_seqs: Annotated[int | None, _vllm("Requests at once.")] = None
    max_num_batched_tokens: Annotated[int | None, _vllm("Tokens per step.")] = None
    max_cudagraph_capture_size: Annotated[
        int | None, _vllm("Rows of the largest graph; P-EAGLE: 2 K times --max-num-seqs.")
    ] = None
    gpu_memory_utilization: Annotated[float | None, _vllm("Share of the GPU's memory.")] = None
    tensor_parallel_size: Annotated[int | None, _vllm("GPUs that share each layer.")] = None
    pipeline_parallel_size: Annotated[int | None, _vllm("Groups of layers.")] = None
    data_parallel_size: Annotated[int | None, _vllm("Copies of the model.")] = None
    enable_prefix_caching: Annotated[bool | None, _vllm("Keep the cache of shared prompts.")] = None
    enforce_eager: Annotated[bool | None, _vllm("No graphs.")] = None
    async_scheduling: Annotated[bool | None, _vllm("Schedule while the GPU computes.")] = None
    stream_interval: Annotated[int | None, _vllm("Tokens per streamed chunk.")] = None
    seed: Annotated[int | None, _vllm("Of the engine.")] = None

    def options(self) -> VllmOptions:
        return VllmOptions(**asdict(self))
