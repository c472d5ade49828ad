"""What `generate`, `prepare` and `bench` see of an engine. Two implementations:
`peagle.LLM`, the embedded engine, satisfies it as it is; `vllm.backend.VllmBackend` is vLLM."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from peagle.engine.offline import OpenPrompt
from peagle.engine.prompts import Message, Prompt, TokenizedPrompt
from peagle.outputs import RequestOutput
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats


class Backend(Protocol):
    """A target, optionally with a drafter. Both count drafts alike: those behind the token that
    ended an answer are not counted, and `num_steps` has the step that follows the prompt too."""

    model_path: Path

    @property
    def method(self) -> str: ...

    @property
    def num_speculative_tokens(self) -> int: ...

    @property
    def stats(self) -> SpecDecodeStats:
        """Totals over all requests since start."""
        ...

    @property
    def num_compiled(self) -> int:
        """How many things were made on first use, such as CUDA graphs: steps that make one are
        slow."""
        ...

    def get_tokenizer(self) -> Any: ...

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt of token ids, ready for an answer."""
        ...

    def check_request(self, prompt: Prompt, sampling_params: SamplingParams) -> None:
        """Raises RequestError if this prompt could not be served with these parameters."""
        ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers all prompts, in their order."""
        ...

    def as_finished(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """The same, but yields each prompt's number and answer when that has ended."""
        ...

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yields the growing output of one prompt. Streams may be read side by side; closing
        one cancels its request."""
        ...

    def add_request(
        self, prompt: TokenizedPrompt, params: SamplingParams, *, streamed: bool = False
    ) -> OpenPrompt:
        """Queues a prompt, for callers that drive many side by side. `streamed`: `step` reports
        it whenever it grows, not only when it ends."""
        ...

    def step(self) -> Sequence[OpenPrompt]:
        """Advances every open prompt; -> those that got something new, each once."""
        ...

    def abort_request(self, prompt: Any) -> None:
        """Gives up what `add_request` returned."""
        ...

    def close(self) -> None:
        """Ends what was started; the backend cannot be used afterwards. May be called twice."""
        ...
