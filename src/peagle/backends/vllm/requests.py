"""A request at vLLM: its sampling parameters there, and its outputs as RequestOutput.

What vLLM cannot do is refused, not dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from peagle.backends.vllm.stats import answer_stats
from peagle.errors import RequestError
from peagle.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from peagle.sampling_params import SamplingParams, StructuredOutputsParams
from peagle.speculation.statistics import SpecDecodeStats

# vLLM's rejection sampler applies neither to drafted positions (vllm/sampling_params.py,
# `_validate_spec_decode`); penalties, bad words and min_tokens it does apply.
NOT_WITH_SPECULATION = ("min_p", "logit_bias")
LARGEST_SEED = 2**63 - 1


def check_params(
    params: SamplingParams, num_speculative_tokens: int, *, sampled_drafts: bool = True
) -> None:
    """Raises RequestError for what vLLM cannot do at this engine's K (0: no drafter).

    `sampled_drafts` False: this build of vLLM verifies drafts of greedy requests alone; see
    `engine.verifies_sampled_drafts`.
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
    if params.num_draft_nodes is not None:
        raise RequestError(
            f"num_draft_nodes={params.num_draft_nodes}: vLLM verifies chains of drafts",
            hint="leave it out, or use the embedded backend",
        )
    if not (sampled_drafts or params.greedy):
        raise RequestError(
            f"temperature={params.temperature}: this CPU build of vLLM verifies drafts of sampled "
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
        "structured_outputs": _structured_outputs(params.structured_outputs),
    }


def _structured_outputs(params: StructuredOutputsParams | None) -> Any:
    if params is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams as VllmParams

    constraint = params.text if params.kind == "json" else getattr(params, params.kind)
    return VllmParams(
        **{params.kind: constraint},
        disable_any_whitespace=params.disable_any_whitespace,
        whitespace_pattern=params.whitespace_pattern,
    )


@dataclass(eq=False)
class OpenRequest:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_model_len: int
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(monotonic()))
    finished: bool = False
    _answers: dict[int, Any] = field(default_factory=dict)  # index -> vLLM's latest output of it

    @property
    def num_output_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self._answers.values())

    def take(self, output: Any) -> None:
        """Takes one of vLLM's RequestOutputs; with n > 1 each brings some of the answers."""
        for answer in output.outputs:
            self._answers[answer.index] = answer
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = self._first_token_time(output)
        if output.finished:
            self.finished = True
            self.metrics.finished_time = monotonic()

    def output(self) -> RequestOutput:
        answers = [self._answers[index] for index in sorted(self._answers)]
        stats = SpecDecodeStats()
        for answer in answers:
            stats.merge(self._stats(answer))
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[_completion(answer) for answer in answers],
            finished=self.finished,
            stats=stats,
            metrics=self.metrics,
        )

    def _stats(self, answer: Any) -> SpecDecodeStats:
        """vLLM hands the counts over with an answer's last token; before that there are none."""
        counts = answer.spec_decode_metrics
        room = self.max_model_len - len(self.prompt_token_ids)
        return answer_stats(
            counts.per_step_drafted if counts else (),
            counts.per_step_accepted if counts else (),
            num_tokens=len(answer.token_ids),
            room=min(self.params.max_tokens or room, room),
            stopped=answer.finish_reason == "stop",
        )

    def _first_token_time(self, output: Any) -> float:
        """Measured by vLLM where the answer came whole, by us where it came in parts."""
        if output.finished and output.metrics is not None:
            return self.metrics.arrival_time + float(output.metrics.first_token_latency)
        return monotonic()


def _completion(answer: Any) -> CompletionOutput:
    logprobs = answer.logprobs
    return CompletionOutput(
        index=answer.index,
        text=answer.text,
        token_ids=list(answer.token_ids),
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        logprobs=None if logprobs is None else [_named(position) for position in logprobs],
        cumulative_logprob=answer.cumulative_logprob if logprobs is not None else None,
        error="vLLM gave no reason" if answer.finish_reason == "error" else None,
    )


def _named(position: dict[int, Any]) -> dict[int, Logprob]:
    return {
        token: Logprob(entry.logprob, entry.rank, entry.decoded_token or "")
        for token, entry in position.items()
    }
