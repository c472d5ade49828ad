"""Prompts in, answers out: what callers see of an engine that they drive in their own process.

`generate` and `stream` are made of three things that each engine has in a form of its own:
`add_request`, `step` and `abort_request`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from peagle.engine.prompts import Message, Prompt, PromptReader, TokenizedPrompt, params_for
from peagle.outputs import RequestOutput
from peagle.sampling_params import SamplingParams


class OpenPrompt(Protocol):
    """A prompt that is being answered."""

    @property
    def finished(self) -> bool: ...

    @property
    def num_output_tokens(self) -> int:
        """The number so far. It is cheap, where `output` copies everything."""
        ...

    def output(self) -> RequestOutput: ...


_Open = TypeVar("_Open", bound=OpenPrompt)


class OfflineInference(ABC, Generic[_Open]):
    def __init__(self, prompts: PromptReader) -> None:
        self._prompts = prompts

    @abstractmethod
    def add_request(
        self, prompt: TokenizedPrompt, params: SamplingParams, *, streamed: bool = False
    ) -> _Open:
        """Queues a prompt. `step` advances it, `abort_request` gives it up."""

    @abstractmethod
    def step(self) -> list[_Open]:
        """Advances every open prompt; -> those that got something new, each once."""

    @abstractmethod
    def abort_request(self, request: _Open) -> None:
        """Gives up what `add_request` returned, if it has not finished."""

    @abstractmethod
    def _check(self, prompt: TokenizedPrompt, params: SamplingParams) -> None:
        """Raises RequestError if this could not be served."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers all prompts, in their order. Raises RequestError before any work if one of
        them can never be served; see `check_request`."""
        outputs = dict(self.as_finished(prompts, sampling_params))
        return [outputs[index] for index in range(len(outputs))]

    def as_finished(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """The same, but yields each prompt's number and answer when that has ended."""
        given = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = params_for(given, sampling_params)
        pairs = [(self._prompts.read(prompt), p) for prompt, p in zip(given, params, strict=True)]
        for pair in pairs:
            self._check(*pair)
        opened: list[_Open] = []
        try:
            for pair in pairs:
                opened.append(self.add_request(*pair))
            left = {id(request): index for index, request in enumerate(opened)}
            ended = [request for request in opened if request.finished]  # at once
            while left:
                for request in ended:
                    if id(request) in left:  # of this call
                        yield left.pop(id(request)), request.output()
                ended = [request for request in self.step() if request.finished] if left else []
        finally:  # Ctrl-C or a bug must not leave requests behind
            for request in opened:
                self.abort_request(request)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yields the growing output of one prompt or conversation after each step that adds to
        it. Streams may be read side by side; closing one cancels its request."""
        tokens, params = self._prompts.read(prompt), sampling_params or SamplingParams()
        self._check(tokens, params)
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
        self._check(self._prompts.read(prompt), sampling_params)

    def get_tokenizer(self) -> Any:
        return self._prompts.tokenizer

    def _follow(
        self, prompt: TokenizedPrompt, params: SamplingParams
    ) -> Generator[RequestOutput, None, None]:
        # Opened in here: a generator that is closed before its first step runs no `finally`.
        request = self.add_request(prompt, params, streamed=True)
        try:
            shown = 0
            while not request.finished:  # another stream's steps may add to it as well
                self.step()
                if request.num_output_tokens != shown and not request.finished:
                    shown = request.num_output_tokens
                    yield request.output()
            yield request.output()
        finally:
            self.abort_request(request)
