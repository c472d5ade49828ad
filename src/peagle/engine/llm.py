"""LLM: the call that vLLM's users know, on the embedded engine."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.checkpoints.targets import eos_token_ids, load_target
from peagle.config import EngineConfig, SpeculativeConfig, from_mapping
from peagle.engine.answers import PromptAnswers, open_answers
from peagle.engine.engine import Engine
from peagle.engine.loading import choose_device, choose_dtype, load_speculation
from peagle.errors import RequestError
from peagle.outputs import RequestOutput
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats

Prompt = str | Mapping[str, Any]  # text, or {"prompt_token_ids": [...]} or {"prompt": text}
Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class _TokenizedPrompt(NamedTuple):
    text: str | None
    token_ids: list[int]


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
        device = choose_device(config)
        self.model_path: Path = resolve_model(model, revision=revision)
        self._tokenizer = load_tokenizer(self.model_path)
        target = load_target(self.model_path, dtype=choose_dtype(config, device), device=device)
        self.engine = Engine(
            target,
            config,
            eos_token_ids=eos_token_ids(self.model_path),
            speculation=load_speculation(speculative, target),
        )
        self._counter = itertools.count()
        self._active: dict[str, PromptAnswers] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers all prompts, in their order. Raises RequestError before any work if one of
        them can never be served; see `check_request`."""
        given = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = _params_for(given, sampling_params)
        pairs = [(self._tokens(prompt), p) for prompt, p in zip(given, params, strict=True)]
        for prompt, p in pairs:
            self.engine.check_request(prompt.token_ids, p)
        opened: list[PromptAnswers] = []
        try:
            for prompt, p in pairs:
                opened.append(self._open(prompt, p))
            while any(not o.finished for o in opened):
                self._step()
        finally:  # Ctrl-C or a bug must not leave requests behind
            for answers in opened:
                self._close(answers)
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
        rendered = prompt if isinstance(prompt, str | Mapping) else self.render_chat(prompt)
        params = sampling_params or SamplingParams()
        tokens = self._tokens(rendered)
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
        if chat_template is None and not self._tokenizer.chat_template:
            raise RequestError(
                "this model has no chat template", hint="use generate with a plain prompt"
            )
        options: dict[str, Any] = dict(kwargs or {})
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        except (TemplateError, TypeError) as error:
            raise RequestError(
                f"the chat template refuses the messages: {error}", hint="check roles and contents"
            ) from error
        # The template writes its own special tokens; the tokenizer must not add them again.
        return {"prompt": text, "prompt_token_ids": self._encode(text, add_special_tokens=False)}

    def check_request(self, prompt: Prompt, sampling_params: SamplingParams) -> None:
        """Raises RequestError if this prompt could not be served with these parameters."""
        self.engine.check_request(self._tokens(prompt).token_ids, sampling_params)

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def stats(self) -> SpecDecodeStats:
        """Totals over all requests since start."""
        return self.engine.stats

    @property
    def method(self) -> str:
        speculation = self.engine.speculation
        return speculation.drafter.method if speculation else "none"

    @property
    def num_speculative_tokens(self) -> int:
        speculation = self.engine.speculation
        return speculation.num_speculative_tokens if speculation else 0

    def _open(self, prompt: _TokenizedPrompt, params: SamplingParams) -> PromptAnswers:
        request_id = str(next(self._counter))
        answers = open_answers(self.engine, self._tokenizer, request_id, *prompt, params)
        for answer in answers.answers:
            self._active[answer.request.request_id] = answers
        return answers

    def _close(self, answers: PromptAnswers) -> None:
        for answer in answers.answers:
            self.engine.abort(answer.request)
            self._active.pop(answer.request.request_id, None)

    def _step(self) -> None:
        for new in self.engine.step():
            self._active[new.request.request_id].take(new, self.engine)

    def _follow(
        self, prompt: _TokenizedPrompt, params: SamplingParams
    ) -> Generator[RequestOutput, None, None]:
        # Opened in here: a generator that is closed before its first step runs no `finally`.
        answers = self._open(prompt, params)
        try:
            shown = -1
            while not answers.finished:
                self._step()
                num_tokens = sum(a.request.num_outputs for a in answers.answers)
                if num_tokens != shown and not answers.finished:
                    shown = num_tokens
                    yield answers.output()
            yield answers.output()
        finally:
            self._close(answers)

    def _tokens(self, prompt: Prompt) -> _TokenizedPrompt:
        if isinstance(prompt, str):
            return _TokenizedPrompt(prompt, self._encode(prompt))
        if "prompt_token_ids" in prompt:
            return _TokenizedPrompt(prompt.get("prompt"), list(prompt["prompt_token_ids"]))
        if "prompt" in prompt:
            return _TokenizedPrompt(prompt["prompt"], self._encode(prompt["prompt"]))
        raise RequestError(
            f"a prompt with keys {sorted(prompt)} says nothing",
            hint='give text, {"prompt": text} or {"prompt_token_ids": [...]}',
        )

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids


def _speculative_config(
    given: SpeculativeConfig | Mapping[str, Any] | None,
) -> SpeculativeConfig:
    if isinstance(given, SpeculativeConfig):
        return given
    return SpeculativeConfig.from_mapping(given or {})


def _params_for(
    prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(prompts)
    if len(given) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(given)} sampling params")
    return list(given)
