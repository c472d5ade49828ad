"""References and our options -> the arguments of vLLM's engine. Starts nothing, imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.backends.released import find_released
from peagle.backends.vllm_command import local_head, merge_options
from peagle.backends.vllm_drafting import Drafting, plan_drafting
from peagle.backends.vllm_models import find_target
from peagle.backends.vllm_options import VllmOptions
from peagle.checkpoints.files import read_json
from peagle.checkpoints.layouts import CONFIG
from peagle.checkpoints.references import resolve_model
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.errors import ConfigError
from peagle.sampling_params import MAX_LOGPROBS

SMALLEST_BUDGET = 2048  # vLLM's own default is this or more, by device


@dataclass(frozen=True, kw_only=True)
class VllmEngineArguments:
    """What an engine is started with, and what it means to us."""

    model_path: Path
    method: str  # ours: vLLM calls p-eagle and eagle3 the same
    num_speculative_tokens: int  # 0: no drafter
    options: VllmOptions
    keywords: Mapping[str, Any]  # of vllm.EngineArgs


def engine_arguments(
    model: str, engine: EngineConfig, drafter: SpeculativeConfig | None, options: VllmOptions
) -> VllmEngineArguments:
    """Exports a native head first, since vLLM cannot read it."""
    refuse_what_one_process_cannot(engine, options)
    released = find_released(model)
    target = find_target(model, fetch=True)
    folder = resolve_model(target.reference)  # a Hugging Face id is fetched here
    target = replace(target, reference=str(folder), config=read_json(folder / CONFIG))
    options = replace(_asked_of(engine), **options.given())
    drafting = plan_drafting(_given(drafter), target, max_model_len=options.max_model_len)
    if drafting is not None:
        _prepare_head(drafting, folder)
    options = _with_room(merge_options(options, released, drafting), drafting)
    return VllmEngineArguments(
        model_path=folder,
        method=_method(drafting),
        num_speculative_tokens=_num_tokens(drafting),
        options=options,
        keywords=_keywords(folder, options, drafting),
    )


def _prepare_head(drafting: Drafting, target: Path) -> None:
    """Exports a native head; checks another that lies on this machine."""
    if drafting.export is not None:
        drafting.export.run()
        return
    if head := local_head(drafting):
        from peagle.backends.vllm_checks import check_head

        check_head(head, target)


def refuse_what_one_process_cannot(engine: EngineConfig, options: VllmOptions) -> None:
    if engine.device != "auto":
        raise ConfigError(
            f"device={engine.device!r}: vLLM takes the device that it was built for",
            hint="drop it; CUDA_VISIBLE_DEVICES chooses among GPUs",
        )
    if engine.batch_invariant:
        raise ConfigError(
            "batch_invariant is an option of the embedded engine's",
            hint="drop it; vLLM reads VLLM_BATCH_INVARIANT=1",
        )
    if (options.data_parallel_size or 1) > 1:
        raise ConfigError(
            f"data_parallel_size={options.data_parallel_size} needs vLLM's server: "
            "an engine in this process is one copy of the model",
            hint="peagle serve --backend vllm, then prepare against its URL",
        )


def _asked_of(engine: EngineConfig) -> VllmOptions:
    """What both engines know and the caller chose: our own defaults are for our own engine."""
    names = (
        *("dtype", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("quantization", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    )
    chosen = {name: getattr(engine, name) for name in names}
    defaults = EngineConfig()
    return VllmOptions(**{n: v for n, v in chosen.items() if v != getattr(defaults, n)})


def _given(drafter: SpeculativeConfig | None) -> dict[str, Any]:
    """The keys vLLM knows too. It always judges by rejection, so `verification` stays here."""
    if drafter is None:
        return {}
    given = {
        "method": drafter.method,
        "model": drafter.model,
        "num_speculative_tokens": drafter.num_speculative_tokens,
    }
    if drafter.method == "ngram":
        given["prompt_lookup_max"] = drafter.prompt_lookup_max
        given["prompt_lookup_min"] = drafter.prompt_lookup_min
    return {name: value for name, value in given.items() if value is not None}


def _with_room(options: VllmOptions, drafting: Drafting | None) -> VllmOptions:
    """A step's budget must hold every request's drafter rows, or some requests wait."""
    if drafting is None or drafting.rows_per_request is None:
        return options
    needed = drafting.rows_per_request * (options.max_num_seqs or 1)
    budget = options.max_num_batched_tokens or SMALLEST_BUDGET
    return options if needed <= budget else replace(options, max_num_batched_tokens=needed)


def _keywords(folder: Path, options: VllmOptions, drafting: Drafting | None) -> dict[str, Any]:
    keywords: dict[str, Any] = {
        "model": str(folder),
        "max_logprobs": MAX_LOGPROBS,
        "disable_log_stats": False,  # the counters of acceptance hang on it
        **options.given(),
    }
    if drafting is not None:
        keywords["speculative_config"] = dict(drafting.config)
        keywords["per_request_spec_decode_metrics"] = "detailed"
    return keywords


def _method(drafting: Drafting | None) -> str:
    if drafting is None:
        return "none"
    return "p-eagle" if drafting.config.get("parallel_drafting") else str(drafting.config["method"])


def _num_tokens(drafting: Drafting | None) -> int:
    return int(drafting.config["num_speculative_tokens"]) if drafting else 0
