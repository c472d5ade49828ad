"""The edge between token ids and text: one prompt's requests, their text, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from peagle.engine.detokenizer import Detokenizer, StopMatch, Tokenizer
from peagle.engine.engine import Engine, NewTokens
from peagle.engine.grammar import GrammarCompiler
from peagle.engine.request import Request, TokenLogprobs
from peagle.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from peagle.sampling_params import SamplingParams
from peagle.speculation.noise import derive_seed
from peagle.speculation.statistics import SpecDecodeStats


@dataclass(eq=False)
class Answer:
    """One of a prompt's n answers while it grows."""

    request: Request
    detokenizer: Detokenizer
    stop_string: str | None = None

    def take(self, new: NewTokens, engine: Engine) -> None:
        """Reads a step's tokens one by one: a stop string ends the answer at the token that
        completes it, as it would without speculation."""
        if self.detokenizer.stop:
            for token in self._shown(new.token_ids):
                if self._stop(self.detokenizer.append(token), engine):
                    return
        if self.request.finish_reason is not None:
            self._stop(self.detokenizer.finish(), engine)

    def text(self) -> str:
        """Of a finished answer all, else what no later token can take back."""
        if not self.detokenizer.stop:  # then `take` read none of the tokens
            self.detokenizer.token_ids = self._shown(self.request.output_token_ids)
        done = self.request.finish_reason is not None
        return self.detokenizer.text if done else self.detokenizer.stable_text

    def _shown(self, token_ids: list[int]) -> list[int]:
        """A token that ends the answer adds no text unless stops are included, as in vLLM."""
        ends = self.request.finish_reason == "stop" and not self.detokenizer.include_stop
        return token_ids[:-1] if ends else token_ids

    def _stop(self, match: StopMatch | None, engine: Engine) -> bool:
        if match is not None:
            self.stop_string = match.stop
            engine.stop_at(self.request, len(self.detokenizer.token_ids))
        return match is not None


@dataclass(eq=False)
class PromptAnswers:
    """All answers to one prompt. Hundreds of them take their part of each step: what is asked
    of all is counted, not searched for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    answers: list[Answer]
    tokenizer: Any
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(monotonic()))
    finished: bool = False
    num_output_tokens: int = 0

    def take(self, new: NewTokens, engine: Engine) -> None:
        if not self.num_output_tokens and new.token_ids:
            self.metrics.first_token_time = monotonic()
        self.num_output_tokens += len(new.token_ids)
        if new.request.finish_reason is not None or self.params.stop:
            self._read(new, engine)

    def _read(self, new: NewTokens, engine: Engine) -> None:
        """Takes tokens that end an answer, or whose text may: those behind it are dropped."""
        (answer,) = [a for a in self.answers if a.request is new.request]
        before = new.request.num_outputs
        answer.take(new, engine)
        self.num_output_tokens -= before - new.request.num_outputs
        self.finished = all(a.request.finish_reason is not None for a in self.answers)
        if self.finished:
            self.metrics.finished_time = monotonic()

    @property
    def stats(self) -> SpecDecodeStats:
        """Over all answers."""
        stats = SpecDecodeStats()
        for answer in self.answers:
            stats.merge(answer.request.stats)
        return stats

    def output(self) -> RequestOutput:
        """A snapshot; text that may still become a stop string is held back."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[self._completion(i, a) for i, a in enumerate(self.answers)],
            finished=self.finished,
            stats=self.stats,
            metrics=self.metrics,
            num_cached_tokens=self.answers[0].request.num_cached_tokens,
        )

    def _completion(self, index: int, answer: Answer) -> CompletionOutput:
        request = answer.request
        reason: FinishReason | None = request.finish_reason
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [self._named(entry) for entry in request.logprobs]
        return CompletionOutput(
            index=index,
            text=answer.text(),
            token_ids=request.output_token_ids,
            finish_reason=reason,
            stop_reason=answer.stop_string or request.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=(
                sum(entry.logprobs[0] for entry in request.logprobs) if logprobs else None
            ),
            error=request.error,
        )

    def _named(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        rows = zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
        return {
            token: Logprob(logprob, rank, self.tokenizer.decode([token]))
            for token, logprob, rank in rows
        }


def open_answers(
    engine: Engine,
    tokenizer: Any,
    decoder: Tokenizer,
    grammars: GrammarCompiler,
    request_id: str,
    prompt: str | None,
    prompt_token_ids: list[int],
    params: SamplingParams,
) -> PromptAnswers:
    """Queues a prompt's n requests. Answer i of a seeded prompt has a seed of its own."""
    bad_words = bad_word_ids(tokenizer, params.bad_words)
    answers = []
    wanted = params.structured_outputs
    for index in range(params.n):
        request = engine.add_request(
            f"{request_id}-{index}",
            prompt_token_ids,
            params,
            bad_word_ids=bad_words,
            grammar=None if wanted is None else grammars.compile(wanted),
            seed=None if params.seed is None else derive_seed(params.seed, index),
        )
        answers.append(Answer(request, _detokenizer(decoder, params)))
    return PromptAnswers(request_id, prompt, prompt_token_ids, params, answers, tokenizer)


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Token sequences of each word at the start of a text and after a space, as vLLM bans them."""
    sequences = []
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences


def _detokenizer(decoder: Tokenizer, params: SamplingParams) -> Detokenizer:
    return Detokenizer(
        decoder,
        params.stop_strings,
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
    )
