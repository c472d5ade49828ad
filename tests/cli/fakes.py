"""A fake engine and a shell that runs command lines in this process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.main import main
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.errors import RequestError
from peagle.outputs import CompletionOutput, FinishReason, RequestOutput
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats

CONTEXT = 200  # characters, which are the fake's tokens
ANSWER = "one two three"


class FakeTokenizer:
    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> list[int]:
        return [ord(c) for m in messages for c in f"<{m['role']}>{m['content']}"]


@dataclass
class FakeLLM:
    """Answers ANSWER to everything, one character a token, two of three drafts kept."""

    model: str
    config: EngineConfig
    speculative_config: SpeculativeConfig | None
    chat_template: str | None = "{{ messages }}"
    failing: str = "\0"  # a prompt with this text ends in finish_reason "error"
    answer: str = ANSWER
    interrupt_at: int | None = None  # Ctrl-C arrives before this chunk of a stream
    requests: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    num_closed: int = 0  # streams
    closed: bool = False

    @property
    def model_path(self) -> Path:
        return Path("/models") / self.model

    @property
    def method(self) -> str:
        return (self.speculative_config and self.speculative_config.method) or "none"

    is_auto = False

    @property
    def num_speculative_tokens(self) -> int:
        return 3 if self.speculative_config else 0

    def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer(self.chat_template)

    def render_chat(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        if messages[0]["role"] == "jester":
            raise RequestError("the chat template refuses the messages: unknown role")
        return {"prompt_token_ids": self.get_tokenizer().apply_chat_template(messages)}

    def check_request(self, prompt: Any, params: SamplingParams) -> None:
        if len(self._text(prompt)) > CONTEXT:
            raise RequestError("the prompt is longer than the context", hint="shorten it")

    def generate(self, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
        return [self._result(self._text(p), params, len(self.answer)) for p in prompts]

    def as_finished(
        self, prompts: list[Any], params: SamplingParams
    ) -> Iterator[tuple[int, RequestOutput]]:
        """In the order of the prompts; `interrupt_at` counts them from 1."""
        for index, prompt in enumerate(prompts):
            if index + 1 == self.interrupt_at:
                signal.raise_signal(signal.SIGINT)
            yield index, self._result(self._text(prompt), params, len(self.answer))

    def chat(self, messages: list[dict[str, str]], params: SamplingParams) -> list[RequestOutput]:
        return self.generate([messages], params)

    def close(self) -> None:
        self.closed = True

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.check_request(prompt, params)
        text = self._text(prompt)
        try:
            for length in range(1, len(self.answer) + 1):
                if length == self.interrupt_at:
                    signal.raise_signal(signal.SIGINT)
                yield self._result(text, params, length)
        finally:
            self.num_closed += 1

    def _text(self, prompt: Any) -> str:
        if isinstance(prompt, list):
            prompt = self.render_chat(prompt)
        return prompt if isinstance(prompt, str) else "".join(map(chr, prompt["prompt_token_ids"]))

    def _result(self, text: str, params: SamplingParams, length: int) -> RequestOutput:
        self.requests.append(text)
        self.params.append(params)
        failed = self.failing in text
        reason: FinishReason = "error" if failed else "length"
        answer = "" if failed else self.answer[:length]
        outputs = [
            CompletionOutput(
                index=i,
                text=answer,
                token_ids=[ord(c) for c in answer],
                finish_reason=reason,
                error="NaN logits" if failed else None,
            )
            for i in range(params.n)
        ]
        return RequestOutput("0", None, [ord(c) for c in text], outputs, True, self._stats())

    def _stats(self) -> SpecDecodeStats:
        stats = SpecDecodeStats()
        if self.speculative_config:
            stats.observe(3, 2)
        return stats


@dataclass
class Shell:
    """Runs command lines in this process; keeps the engines they built."""

    capture: pytest.CaptureFixture[str]
    engines: list[FakeLLM]
    make: Callable[..., FakeLLM] = FakeLLM
    code: int = 0
    out: str = ""
    err: str = ""

    def __call__(self, *args: str) -> int:
        self.code = main(list(args))
        self.out, self.err = self.capture.readouterr()
        assert "Traceback" not in self.err
        return self.code

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])

    @property
    def llm(self) -> FakeLLM:
        return self.engines[-1]
