"""The answer to a job by plain decoding, for which every token is computed from the whole prefix.

It is the oracle of the engine's tests: it shares with the engine the model and the definition of
the noise, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from peagle.engine.request import Request
from peagle.models.attention import causal_attention
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams, StructuredOutputsParams
from peagle.speculation.noise import gumbel_noise
from peagle.speculation.sampling import SamplingRows, filter_logits, sample

from .jobs import Job, grammars
from .models import CONTEXT


def answer(target: TargetModel, job: Job, max_model_len: int = CONTEXT) -> list[int]:
    """The plain answer to a job, token by token, each from the whole prefix."""
    prompt, p = job.prompt, job.params
    room = max_model_len - len(prompt)
    ends = set(p.stop_token_ids) | (set() if p.ignore_eos else set(job.eos))
    output: list[int] = []
    while len(output) < (room if p.max_tokens is None else min(p.max_tokens, room)):
        logits = logits_of(target, prompt + output)[-1]
        logits = _adjusted(logits, prompt, output, job, ends)
        output.append(sampled_token(logits, p, len(output)))
        if output[-1] in ends:
            break
    return output


def check(target: TargetModel, requests: Sequence[Request], jobs: Sequence[Job]) -> None:
    assert [r.output_token_ids for r in requests] == [answer(target, j) for j in jobs]


def known(target: TargetModel, jobs: Sequence[Job]) -> list[list[int]]:
    """Whole sequences, as scripts want them."""
    return [j.prompt + answer(target, j) for j in jobs]


def logits_of(target: TargetModel, token_ids: Sequence[int]) -> Tensor:
    """[n, V], from scratch."""
    return _logits_of(target, tuple(token_ids))


@lru_cache(maxsize=4000)  # many tests ask for the same answers
@torch.inference_mode()
def _logits_of(target: TargetModel, token_ids: tuple[int, ...]) -> Tensor:
    positions = torch.arange(len(token_ids))
    hidden, _ = target(torch.tensor(token_ids), positions, causal_attention(positions))
    return target.logits(hidden)


def aux_hidden_states_of(
    target: TargetModel, token_ids: Sequence[int], layers: tuple[int, ...]
) -> Tensor:
    positions = torch.arange(len(token_ids))
    aux_hidden_states = target(
        torch.tensor(token_ids), positions, causal_attention(positions), layers
    ).aux_hidden_states
    assert aux_hidden_states is not None
    return aux_hidden_states


def _adjusted(
    logits: Tensor, prompt: list[int], output: list[int], job: Job, ends: set[int]
) -> Tensor:
    p = job.params
    values = logits.tolist()
    if p.structured_outputs is not None:
        values = _masked(values, p.structured_outputs, output)
    for *prefix, last in job.bad_word_ids:
        if not prefix or output[-len(prefix) :] == prefix:
            values[last] = -float("inf")
    for token in ends if len(output) < p.min_tokens else ():
        values[token] = -float("inf")
    for token, bias in p.logit_bias.items():
        values[token] += bias
    for token in {*prompt, *output}:
        factor = p.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    return torch.tensor(values, dtype=logits.dtype)


def _masked(values: list[float], wanted: StructuredOutputsParams, output: list[int]) -> list[float]:
    """A matcher that has seen nothing but the answer says what may follow it."""
    matcher = grammars().compile(wanted)._matcher
    assert matcher.consume_tokens(output)
    permitted = matcher.compute_logit_bias()
    pairs = zip(values, permitted, strict=True)
    return [value if allowed else -float("inf") for value, allowed in pairs]


def sampled_token(logits: Tensor, p: SamplingParams, position: int) -> int:
    if p.greedy:
        return int(logits.argmax())
    assert p.seed is not None
    noise = gumbel_noise(torch.tensor([p.seed]), torch.tensor([position]), len(logits))
    return int(sample(filtered(logits, p), noise))


def filtered(logits: Tensor, p: SamplingParams) -> Tensor:
    """[1, V]"""
    rows = SamplingRows(
        torch.tensor([p.temperature]),
        torch.tensor([max(p.top_k, 0)]),
        torch.tensor([p.top_p]),
        torch.tensor([p.min_p]),
    )
    return filter_logits(logits[None], rows)
