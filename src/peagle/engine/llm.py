"""LLM: the call that vLLM's users know, on the embedded engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.checkpoints.targets import eos_token_ids
from peagle.config import EngineConfig, SpeculativeConfig, from_mapping
from peagle.engine.answers import PromptAnswers, open_answers
from peagle.engine.detokenizer import decoder_of
from peagle.engine.engine import Engine
from peagle.engine.grammar import GrammarCompiler
from peagle.engine.loading import choose_device, load_engine_target, load_speculation
from peagle.engine.offline import OfflineInference
from peagle.engine.prompts import Message, PromptReader, TokenizedPrompt
from peagle.engine.request import Request
from peagle.outputs import RequestOutput
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats


class LLM(OfflineInference[PromptAnswers]):
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
        super().__init__(PromptReader(self._tokenizer))
        target = load_engine_target(self.model_path, config)
        self.engine = Engine(
            target,
            config,
            eos_token_ids=eos_token_ids(self.model_path),
            speculation=load_speculation(speculative, target),
        )
        self._grammars = GrammarCompiler(
            self._tokenizer, target.config.vocab_size, self.engine.eos_token_ids
        )
        self._counter = itertools.count()
        self._active: dict[Request, PromptAnswers] = {}
        if config.warm_up:
            self.engine.warm_up()

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
    def is_auto(self) -> bool:
        """Whether each step verifies as many drafts as pay."""
        return self.engine.budget is not None

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
            self.engine,
            self._tokenizer,
            self._decoder,
            self._grammars,
            request_id,
            *prompt,
            params,
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

    def abort_request(self, request: PromptAnswers) -> None:
        for answer in request.answers:
            self.engine.abort_request(answer.request)
        request.finished = True
        self._forget(request)

    def _check(self, prompt: TokenizedPrompt, params: SamplingParams) -> None:
        self.engine.check_request(prompt.token_ids, params)
        if params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)

    def _forget(self, answers: PromptAnswers) -> None:
        for answer in answers.answers:
            self._active.pop(answer.request, None)


def _speculative_config(
    given: SpeculativeConfig | Mapping[str, Any] | None,
) -> SpeculativeConfig:
    if isinstance(given, SpeculativeConfig):
        return given
    return SpeculativeConfig.from_mapping(given or {})
