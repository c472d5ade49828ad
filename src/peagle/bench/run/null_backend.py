"""A backend that computes nothing: what remains is what the harness itself costs."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.engine.prompts import Message, Prompt, TokenizedPrompt, params_for
from peagle.outputs import CompletionOutput, RequestOutput
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats

VOCABULARY = 256


class NullTokenizer:
    """A character is a token."""

    chat_template = "none needed"
    all_special_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return VOCABULARY

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % VOCABULARY for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, messages: Sequence[Message], **_: Any) -> str:
        return "".join(str(message["content"]) for message in messages)


@dataclass(eq=False)
class NullPrompt:
    prompt: TokenizedPrompt
    max_tokens: int
    num_output_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.num_output_tokens >= self.max_tokens

    def output(self) -> RequestOutput:
        token_ids = [n % VOCABULARY for n in range(self.num_output_tokens)]
        answer = CompletionOutput(0, "", token_ids, "length" if self.finished else None)
        stats = SpecDecodeStats(num_output_tokens=self.num_output_tokens)
        text, prompt_ids = self.prompt
        return RequestOutput("0", text, prompt_ids, [answer], self.finished, stats)


class NullBackend:
    """Answers tokens 0, 1, 2 ... at once, `tokens_per_step` of them for every open prompt."""

    model_path = Path("null")
    method = "none"
    num_speculative_tokens = 0
    num_compiled = 0

    def __init__(self, tokens_per_step: int = 1) -> None:
        self.tokens_per_step = tokens_per_step
        self.stats = SpecDecodeStats()
        self._tokenizer = NullTokenizer()
        self._open: list[NullPrompt] = []

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        text = self._tokenizer.apply_chat_template(messages)
        return {"prompt": text, "prompt_token_ids": self._tokenizer.encode(text)}

    def check_request(self, prompt: Prompt, sampling_params: SamplingParams) -> None:
        pass

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        given = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        empty = TokenizedPrompt(None, [])
        opened = [self.add_request(empty, params) for params in params_for(given, sampling_params)]
        while not all(prompt.finished for prompt in opened):
            self.step()
        return [prompt.output() for prompt in opened]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
    ) -> Generator[RequestOutput, None, None]:
        opened = self.add_request(TokenizedPrompt(None, []), sampling_params or SamplingParams())
        while not opened.finished:
            self.step()
            yield opened.output()

    def add_request(
        self, prompt: TokenizedPrompt, params: SamplingParams, *, streamed: bool = False
    ) -> NullPrompt:
        opened = NullPrompt(prompt, params.max_tokens or 1)
        self._open.append(opened)
        return opened

    def step(self) -> list[NullPrompt]:
        changed = self._open
        for prompt in changed:
            wanted = prompt.num_output_tokens + self.tokens_per_step
            prompt.num_output_tokens = min(wanted, prompt.max_tokens)
        self._open = [prompt for prompt in changed if not prompt.finished]
        return changed

    def abort_request(self, prompt: Any) -> None:
        self._open = [other for other in self._open if other is not prompt]

    def close(self) -> None:
        self._open.clear()
