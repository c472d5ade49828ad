"""Both engines on the same prompts, with the same head: what each says and how it got there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from peagle import LLM, SamplingParams
from peagle.backends.vllm.backend import VllmBackend
from peagle.backends.vllm.options import VllmOptions
from peagle.cli.demo import PROMPTS
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.outputs import RequestOutput
from peagle.speculation.statistics import SpecDecodeStats

MODEL = "smollm2-135m"
QUESTIONS = (
    *PROMPTS,
    "Give me three tips for sleeping better.",
    "Write a SQL query that lists each customer with the number of their orders.",
    "What is the difference between a simile and a metaphor? Give two examples of each.",
    "Translate into French: The train to Lyon leaves at half past seven.",
    "A garden is 12 metres long and 8 metres wide. How much fence does it need?",
    "Write a short poem about a lamp that is afraid of the dark.",
    "Explain what a hash table is to somebody who knows only lists.",
    "Write an e-mail to a neighbour who plays the piano late at night.",
    "List the planets of the solar system from the smallest to the largest.",
    "Write a Python class for a bank account with deposit and withdraw.",
    "Why do ships float although they are made of steel?",
    "Name five animals that sleep through the winter, and say where each of them sleeps.",
)
# ignore_eos: both count drafts up to the same 64th token, whatever an answer does before.
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
# All prompts fit in one step. At the end of a chunk vLLM 0.32 gives the drafter the prompt's last
# token instead of the next one (`prepare_next_token_ids_padded`), which changes later drafts.
ENGINE = EngineConfig(
    dtype="float32",
    max_model_len=512,
    max_num_seqs=len(QUESTIONS),
    max_num_batched_tokens=2048,
)
NEAR_TIE = 1e-3  # logits; rounding of float32 sums in another order is two powers of ten below


class Outcome(NamedTuple):
    outputs: list[RequestOutput]
    stats: SpecDecodeStats
    counters: SpecDecodeStats | None = None  # vLLM's own totals

    @property
    def answers(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]


def drafter(head: str | None, k: int) -> SpeculativeConfig | None:
    return None if head is None else SpeculativeConfig(model=head, num_speculative_tokens=k)


@contextmanager
def vllm(
    model: str, head: str | None = None, k: int = 0, engine: EngineConfig = ENGINE, **options: Any
) -> Iterator[VllmBackend]:
    """Eager: compiling costs a minute and changes no result that we look at."""
    chosen = VllmOptions(enforce_eager=True, kv_cache_memory_bytes=1 << 29, **options)
    backend = VllmBackend(model, engine, drafter(head, k), chosen)
    try:
        yield backend
    finally:
        backend.close()


def embedded(model: str, head: str | None = None, k: int = 0, engine: EngineConfig = ENGINE) -> LLM:
    return LLM(
        model,
        speculative_config=drafter(head, k),
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
    )


def run_vllm(model: str, prompts: Sequence[Any], head: str | None, k: int) -> Outcome:
    with vllm(model, head, k) as backend:
        outputs = backend.generate(prompts, GREEDY)
        return Outcome(outputs, backend.stats, backend.engine_counters())


def run_embedded(model: str, prompts: Sequence[Any], head: str | None, k: int) -> Outcome:
    llm = embedded(model, head, k)
    return Outcome(llm.generate(prompts, GREEDY), llm.stats)


def assert_same_tokens(llm: LLM, ours: Outcome, theirs: Outcome) -> None:
    """Token for token, or parted at a place where the target itself can hardly decide."""
    for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
        a, b = mine.outputs[0].token_ids, other.outputs[0].token_ids
        if a != b:
            at = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
            gap = _gap(llm, [*mine.prompt_token_ids, *a[:at]], a[at], b[at])
            assert gap < NEAR_TIE, f"token {at}: {a[at]} and {b[at]} are {gap} apart"


@torch.inference_mode()
def _gap(llm: LLM, tokens: list[int], first: int, second: int) -> float:
    """By how much the plain target prefers one token to another, with no cache and no batch."""
    request = llm.engine.add_request("gap", tokens, SamplingParams(max_tokens=1, logprobs=1024))
    while llm.engine.has_unfinished:
        llm.engine.step()
    entry = request.logprobs[0]
    known = dict(zip(entry.token_ids, entry.logprobs, strict=True))
    return abs(known[first] - known[second])
