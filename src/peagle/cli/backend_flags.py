"""Which engine answers, and what only vLLM is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from peagle.backends import BackendName
from peagle.backends.vllm.options import VllmOptions
from peagle.cli.options import EngineFlags
from peagle.errors import ConfigError


def _vllm(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel="vLLM", show_default=False)


@dataclass(frozen=True, kw_only=True)
class BackendFlags:
    """Field names are those of VllmOptions; what is not given keeps vLLM's default."""

    backend: Annotated[
        BackendName, typer.Option(help="The engine that answers.", rich_help_panel="Engine")
    ] = "embedded"
    tensor_parallel_size: Annotated[int | None, _vllm("GPUs that share each layer.")] = None
    pipeline_parallel_size: Annotated[int | None, _vllm("Groups of layers.")] = None
    data_parallel_size: Annotated[int | None, _vllm("Copies; peagle serve alone can.")] = None
    kv_cache_dtype: Annotated[str | None, _vllm("auto, fp8 ...")] = None
    enable_prefix_caching: Annotated[bool | None, _vllm("Keep the cache of shared prompts.")] = None
    enforce_eager: Annotated[bool | None, _vllm("No graphs.")] = None
    max_cudagraph_capture_size: Annotated[
        int | None, _vllm("Rows of the largest graph; P-EAGLE: 2 K times --max-num-seqs.")
    ] = None

    def vllm_options(self, engine: EngineFlags) -> VllmOptions | None:
        """None for the embedded engine, which refuses what only vLLM knows."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        del given["backend"]
        if self.backend == "vllm":
            return VllmOptions(
                **given,
                max_num_seqs=engine.max_num_seqs,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                block_size=engine.block_size,
                kv_cache_memory_bytes=engine.kv_cache_memory_bytes,
                quantization=engine.quantization,
                gpu_memory_utilization=engine.gpu_memory_utilization,
            )
        for name in given:
            raise ConfigError(
                f"--{name.replace('_', '-')} is an option of vLLM's",
                hint="add --backend vllm, or drop it",
            )
        return None
