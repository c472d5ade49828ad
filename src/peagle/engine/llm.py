"""LLM: the call that vLLM's users know, on the embedded engine."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.checkpoints.targets import eos_token_ids
from peagle.config import EngineConfig, SpeculativeConfig, from_mapping
from peagle.engine.answers import PromptAnswers, open_answers
from peagle.engine.detokenizer import decoder_of
from peagle.engine.engine import Engine
from peagle.engine.loading import choose_device, load_engine_target, load_speculation
from peagle.engine.prompts import (
    Message,
    Prompt,
    PromptReader,
    TokenizedPrompt,
    params_for,
)
from peagle.engine.request import Request
from peagle.outputs import RequestOutput
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats


class LLM:
    """A target, optionally with a drafter, behind `generate`, `chat` and `stream`.

    `speculative_config` takes vLLM's keys; other keywords are those of EngineConfig.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        revision: str | None = None,
        **options: Any,
    ) -> None:
        config = from_mapping(EngineConfig, options, "LLM(...)")
        speculative = _speculative_config(speculative_config)
        choose_device(config)  # a device that is not there is said before a model is fetched
        self.model_path: Path = resolve_model(model, revision=revision)
        self._tokenizer = load_tokenizer(self.model_path)
        self._decoder = decoder_of(self._tokenizer)
        self._prompts = PromptReader(self._tokenizer)
        target = load_engine_target(self.model_path, config)
        self.engine = Engine(
            target,
            config,
            eos_token_ids=eos_token_ids(self.model_path),
            speculation=load_speculation(speculative, target),
        )
        self._counter = itertools.count()
        self._active: dict[Request, PromptAnswers] = {}
        if config.warm_up:
            self.engine.warm_up()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers all prompts, in their order. Raises RequestError before any work if one of
        them can never be served; see `check_request`."""
        given = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = params_for(given, sampling_params)
        pairs = [(self._prompts.read(prompt), p) for prompt, p in zip(given, params, strict=True)]
        for prompt, p in pairs:
            self.engine.check_request(prompt.token_ids, p)
        opened: list[PromptAnswers] = []
        try:
            for prompt, p in pairs:
                opened.append(self.add_request(prompt, p))
            unfinished = {o for o in opened if not o.finished}
            while unfinished:
                unfinished.difference_update(a for a in self.step() if a.finished)
        finally:  # Ctrl-C or a bug must not leave requests behind
            for answers in opened:
                self.abort_request(answers)
        return [o.output() for o in opened]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` on conversations, rendered by the model's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        prompts = [
            self.render_chat(c, chat_template=chat_template, kwargs=chat_template_kwargs)
            for c in conversations
        ]
        return self.generate(prompts, sampling_params)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yields the growing output of one prompt or conversation after each step that adds to
        it. Streams may be read side by side; closing one cancels its request."""
        params = sampling_params or SamplingParams()
        tokens = self._prompts.read(prompt)
        self.engine.check_request(tokens.token_ids, params)
        return self._follow(tokens, params)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt of token ids, ready for an answer."""
        return self._prompts.render_chat(messages, chat_template=chat_template, kwargs=kwargs)

    def check_request(self, prompt: Prompt, sampling_params: SamplingParams) -> None:
        """Raises RequestError if this prompt could not be served with these parameters."""
        self.engine.check_request(self._prompts.read(prompt).token_ids, sampling_params)

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def close(self) -> None:
        """Nothing to end here: the engine lives in this process. Other backends start some."""

    @property
    def stats(self) -> SpecDecodeStats:
        """Totals over all requests since start."""
        return self.engine.stats

    @property
    def num_compiled(self) -> int:
        """Steps captured as CUDA graphs so far; 0 on a CPU."""
        return self.engine.num_graphs

    @property
    def method(self) -> str:
        speculation = self.engine.speculation
        return speculation.drafter.method if speculation else "none"

    @property
    def num_speculative_tokens(self) -> int:
        speculation = self.engine.speculation
        return speculation.num_speculative_tokens if speculation else 0

    def add_request(
        self, prompt: TokenizedPrompt, params: SamplingParams, *, streamed: bool = False
    ) -> PromptAnswers:
        """Queues a prompt. `step` advances it, `abort_request` gives it up. `streamed` is
        the contract's: here every prompt is reported as it grows."""
        request_id = str(next(self._counter))
        answers = open_answers(
            self.engine, self._tokenizer, self._decoder, request_id, *prompt, params
        )
        for answer in answers.answers:
            self._active[answer.request] = answers
        return answers

    def step(self) -> list[PromptAnswers]:
        """Advances every open prompt; -> those that got something new, each once."""
        changed: dict[PromptAnswers, None] = {}
        for new in self.engine.step():
            answers = self._active[new.request]
            answers.take(new, self.engine)
            changed[answers] = None
        for answers in changed:
            if answers.finished:
                self._forget(answers)
        return list(changed)

    def abort_request(self, answers: PromptAnswers) -> None:
        for answer in answers.answers:
            self.engine.abort_request(answer.request)
        answers.finished = True
        self._forget(answers)

    def _forget(self, answers: PromptAnswers) -> None:
        for answer in answers.answers:
            self._active.pop(answer.request, None)

    def _follow(
        self, prompt: TokenizedPrompt, params: SamplingParams
    ) -> Generator[RequestOutput, None, None]:
        # Opened in here: a generator that is closed before its first step runs no `finally`.
        answers = self.add_request(prompt, params)
        try:
            shown = -1
            while not answers.finished:
                self.step()
                if answers.num_output_tokens != shown and not answers.finished:
                    shown = answers.num_output_tokens
                    yield answers.output()
            yield answers.output()
        finally:
            self.abort_request(answers)


def _speculative_config(
    given: SpeculativeConfig | Mapping[str, Any] | None,
) -> SpeculativeConfig:
    if isinstance(given, SpeculativeConfig):
        return given
    return SpeculativeConfig.from_mapping(given or {})
