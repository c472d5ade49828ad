"""Arguments of vLLM's that the embedded engine does not have: values that change nothing here are
accepted, so that a script for vLLM runs as it is; others are refused, with the reason.

An argument that has a field of its own in a config is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from peagle.errors import PeagleError, RequestError

ANY = object()  # every value is accepted


class Unused(NamedTuple):
    accepted: tuple[Any, ...]
    reason: str = ""  # why other values are refused


def _only(*accepted: Any, because: str) -> Unused:
    return Unused(accepted, because)


_IGNORED = Unused((ANY,))
_ONE_DEVICE = "the embedded engine runs on one device"
_TEXT_ALONE = "it reads text alone"
_GENERATES = "it generates and does nothing else"
_OWN_WEIGHTS = "weights are read as the folder has them, in one place"
_NO_ADAPTERS = "it has no LoRA adapters"
_NO_REMOTE_CODE = "code that comes with a model is never run"
_ONE_CACHE = "the cache has the dtype of the model"
_TEMPLATE = "pass chat_template to chat()"

LLM_ARGUMENTS: dict[str, Unused] = {
    # Speed, logs and progress: no token depends on them.
    "async_scheduling": _IGNORED,
    "attention_backend": _IGNORED,
    "attention_config": _IGNORED,
    "compilation_config": _IGNORED,
    "cudagraph_capture_sizes": _IGNORED,
    "disable_cascade_attn": _IGNORED,
    "disable_custom_all_reduce": _IGNORED,
    "disable_log_stats": _IGNORED,
    "enable_chunked_prefill": _IGNORED,
    "enforce_eager": _IGNORED,
    "max_cudagraph_capture_size": _IGNORED,
    "optimization_level": _IGNORED,
    "swap_space": _IGNORED,
    "use_tqdm_on_load": _IGNORED,
    # One device.
    "data_parallel_size": _only(None, 1, because=_ONE_DEVICE),
    "distributed_executor_backend": _only(None, "uni", because=_ONE_DEVICE),
    "enable_expert_parallel": _only(None, False, because=_ONE_DEVICE),
    "pipeline_parallel_size": _only(None, 1, because=_ONE_DEVICE),
    "tensor_parallel_size": _only(None, 1, because=_ONE_DEVICE),
    # The model and its tokenizer are one folder.
    "chat_template": _only(None, because=_TEMPLATE),
    "config_format": _only(None, "auto", "hf", because=_OWN_WEIGHTS),
    "cpu_offload_gb": _only(None, 0, because=_OWN_WEIGHTS),
    "offload_group_size": _only(None, 0, because=_OWN_WEIGHTS),
    "offload_num_in_group": _IGNORED,  # without a group it says nothing
    "offload_params": _only(None, set(), because=_OWN_WEIGHTS),
    "offload_prefetch_step": _IGNORED,
    "download_dir": _only(None, because="HF_HOME says where downloads are kept"),
    "hf_overrides": _only(None, {}, because="config.json is read as it is"),
    "hf_token": _only(None, because="`hf auth login` or HF_TOKEN gives it"),
    "kv_cache_dtype": _only(None, "auto", because=_ONE_CACHE),
    "load_format": _only(None, "auto", "safetensors", because=_OWN_WEIGHTS),
    "quantization_config": _only(None, because="quantization='fp8' is what there is"),
    "served_model_name": _IGNORED,
    "skip_tokenizer_init": _only(None, False, because="prompts and answers have text"),
    "tokenizer": _only(None, because="the tokenizer is the model's"),
    "tokenizer_mode": _only(None, "auto", "hf", because="the tokenizer is the model's"),
    "tokenizer_revision": _only(None, because="the tokenizer is the model's"),
    "trust_remote_code": _only(None, False, because=_NO_REMOTE_CODE),
    "code_revision": _only(None, because=_NO_REMOTE_CODE),
    # What it cannot do.
    "allowed_local_media_path": _only(None, "", because=_TEXT_ALONE),
    "allowed_media_domains": _only(None, because=_TEXT_ALONE),
    "enable_return_routed_experts": _only(None, False, because="it runs no experts"),
    "return_sampling_mask": _only(None, False, because="log-probabilities are what it returns"),
    "structured_outputs_config": _IGNORED,
    "profiler_config": _only(None, because="torch.profiler may be put around it"),
    "convert": _only(None, "auto", "none", because=_GENERATES),
    "enable_lora": _only(None, False, because=_NO_ADAPTERS),
    "generation_config": _only(
        None, "vllm", because="the model's generation_config.json is not read: give SamplingParams"
    ),
    "limit_mm_per_prompt": _only(None, {}, because=_TEXT_ALONE),
    "logits_processors": _only(None, [], because="speculation would not be lossless with them"),
    "mm_processor_kwargs": _only(None, {}, because=_TEXT_ALONE),
    "override_generation_config": _only(None, {}, because="give SamplingParams"),
    "pooler_config": _only(None, because=_GENERATES),
    "runner": _only(None, "auto", "generate", because=_GENERATES),
    "scheduling_policy": _only(None, "fcfs", because="requests are served in their order"),
    "task": _only(None, "auto", "generate", because=_GENERATES),
}

GENERATE_ARGUMENTS: dict[str, Unused] = {
    "lora_request": _only(None, because=_NO_ADAPTERS),
    "mm_processor_kwargs": _only(None, {}, because=_TEXT_ALONE),
    "priority": _only(None, 0, because="requests are served in their order"),
    "tokenization_kwargs": _only(None, {}, because="prompts are tokenized as the model wants it"),
}

SAMPLING_ARGUMENTS: dict[str, Unused] = {
    "allowed_token_ids": _only(None, because="logit_bias and bad_words change what may be said"),
    "detokenize": _IGNORED,  # text is there in any case
    "extra_args": _only(None, {}, because="it has none"),
    "flat_logprobs": _only(None, False, because="log-probabilities are a dictionary per token"),
    "logprob_token_ids": _only(None, because="logprobs=N gives the N best tokens"),
    "output_kind": _only(None, 0, 2, because="each output has all the text so far"),  # not deltas
    "prompt_logprobs": _only(None, because="log-probabilities are those of answers"),
    "prompt_logprob_start": _only(None, because="log-probabilities are those of answers"),
    "prompt_logprob_token_ids": _only(None, because="log-probabilities are those of answers"),
    "routed_experts_prompt_start": _IGNORED,
    "trace_decode_token_ids": _only(None, because="answers are decoded, not forced"),
    "repetition_detection": _only(None, because="no answer is ended for repeating itself"),
    "skip_clone": _IGNORED,
    "skip_reading_prefix_cache": _IGNORED,
    "spaces_between_special_tokens": _IGNORED,  # of slow tokenizers
    "stream_interval": _only(None, 1, because="a stream yields after every step"),
    "thinking_token_budget": _only(None, because="max_tokens limits an answer as a whole"),
    "truncate_prompt_tokens": _only(None, because="prompts are never cut"),
    "watermarking": _only(None, False, because="answers are the model's own"),
}

_SAME_AS_TARGET = "a head runs beside its target, in the target's dtype and on its device"
SPECULATIVE_ARGUMENTS: dict[str, Unused] = {
    "attention_backend": _IGNORED,
    "disable_eagle_block_drop": _IGNORED,
    "disable_padded_drafter_batch": _IGNORED,
    "draft_load_config": _only(None, because=_OWN_WEIGHTS),
    "draft_tensor_parallel_size": _only(None, 1, because=_ONE_DEVICE),
    "enable_adaptive_verification": _only(None, False, because="every draft token is verified"),
    "enforce_eager": _IGNORED,
    "kv_cache_dtype": _only(None, "auto", because=_ONE_CACHE),
    "max_model_len": _only(None, because=_SAME_AS_TARGET),
    "moe_backend": _IGNORED,
    "num_speculative_tokens_per_batch_size": _only(
        None, because="SamplingParams(num_speculative_tokens=K) says it for a request"
    ),
    "quantization": _only(None, because=_SAME_AS_TARGET),
    "rejection_sample_method": _only(
        None, "standard", "strict", because="verification='coupled' or 'rejection' says it here"
    ),
    "revision": _only(None, because="give the head's folder"),
    "code_revision": _only(None, because=_NO_REMOTE_CODE),
    "tensor_parallel_size": _only(None, 1, because=_ONE_DEVICE),
    "use_heterogeneous_vocab": _only(None, False, because="head and target share a vocabulary"),
    "use_local_argmax_reduction": _IGNORED,
}


def drop_unused(
    given: Mapping[str, Any],
    table: Mapping[str, Unused],
    error: type[PeagleError],
    *,
    hint: str = "",
) -> dict[str, Any]:
    """`given` without the arguments of the table; one whose value would change something is an
    error, by default with the hint to leave it out."""
    for name in given.keys() & table.keys():
        if not _changes_nothing(given[name], table[name]):
            raise error(
                f"{name}={given[name]!r} is not supported: {table[name].reason}",
                hint=hint or f"leave {name} out",
            )
    return {name: value for name, value in given.items() if name not in table}


def refuse_others(given: Mapping[str, Any], table: Mapping[str, Unused]) -> None:
    """For a function that has use for none of `given`."""
    for name in drop_unused(given, table, RequestError):
        raise TypeError(f"unexpected keyword argument {name!r}")


def _changes_nothing(value: Any, unused: Unused) -> bool:
    plain = value.value if isinstance(value, Enum) else value
    values = plain if isinstance(plain, list) and plain else [plain]  # one for each prompt
    return ANY in unused.accepted or all(
        any(v == a and isinstance(v, bool) == isinstance(a, bool) for a in unused.accepted)
        for v in values
    )
