"""Our SamplingParams as vLLM's, field by field. What vLLM cannot do is refused, not dropped."""

from __future__ import annotations

from typing import Any

from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams

# vLLM's rejection sampler applies neither to drafted positions (vllm/sampling_params.py,
# `_validate_spec_decode`); penalties, bad words and min_tokens it does apply.
NOT_WITH_SPECULATION = ("min_p", "logit_bias")
LARGEST_SEED = 2**63 - 1


def check_params(
    params: SamplingParams, num_speculative_tokens: int, *, sampled_drafts: bool = True
) -> None:
    """Raises RequestError for what vLLM cannot do at this engine's K (0: no drafter).

    `sampled_drafts` False: this build of vLLM judges greedy drafts alone; see vllm_start.
    """
    if not num_speculative_tokens:
        return
    for name in NOT_WITH_SPECULATION:
        if getattr(params, name):
            raise RequestError(
                f"vLLM cannot combine {name} with speculative decoding",
                hint="drop it, use method none, or the embedded backend, which can",
            )
    asked = params.num_speculative_tokens
    if asked not in (None, num_speculative_tokens):
        raise RequestError(
            f"num_speculative_tokens={asked} for one request: "
            f"vLLM drafts {num_speculative_tokens} for all of them",
            hint="leave it out, or use the embedded backend, where each request has its own",
        )
    if not (sampled_drafts or params.greedy):
        raise RequestError(
            f"temperature={params.temperature}: this CPU build of vLLM judges drafts of sampled "
            "requests by uninitialised memory",
            hint="use temperature 0, method none, or the embedded backend",
        )


def vllm_params(params: SamplingParams) -> dict[str, Any]:
    """Keyword arguments for vllm.SamplingParams, all but how the output is delivered."""
    return {
        "n": params.n,
        "temperature": 0.0 if params.greedy else params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": dict(params.logit_bias) or None,
        "bad_words": list(params.bad_words),
        "min_tokens": params.min_tokens,
        "max_tokens": params.max_tokens,
        "seed": None if params.seed is None else params.seed & LARGEST_SEED,
        "stop": list(params.stop_strings),
        "stop_token_ids": list(params.stop_token_ids),
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "ignore_eos": params.ignore_eos,
        "logprobs": params.logprobs,
        "skip_special_tokens": params.skip_special_tokens,
    }
