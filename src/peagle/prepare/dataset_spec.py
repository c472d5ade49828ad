"""How a dataset is made: what its manifest records, and what a second run must repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peagle.data.chat_formats import answer_format, sent_back
from peagle.data.fingerprints import template_fingerprint, tokenizer_fingerprint
from peagle.errors import DataError
from peagle.prepare.dialogue import DialogueOptions, Renderer, chat_renderer, raw_renderer
from peagle.sampling_params import SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "max_tokens")
EMBEDDED = "embedded engine"


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    target: str  # the reference, as the user writes it
    params: SamplingParams
    seed: int = 0
    system: str | None = None
    raw: bool = False  # prompts as they are, without the chat template
    cut_loops: int | None = None
    answers_from: str = EMBEDDED
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # a reasoning mode ...

    def record(self, tokenizer: Any) -> dict[str, Any]:
        """What the manifest records."""
        kwargs = {"chat_template_kwargs": dict(self.chat_template_kwargs)}
        return {
            "target": self.target,
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "chat_template": None if self.raw else template_fingerprint(tokenizer),
            "answers_from": self.answers_from,
            "system": self.system,
            **{name: getattr(self.params, name) for name in SAMPLING},
            "seed": self.seed,
            "cut_loops": self.cut_loops,
            **(kwargs if self.chat_template_kwargs else {}),
        }

    def dialogue_options(self, tokenizer: Any) -> DialogueOptions:
        form = None if self.raw else answer_format(tokenizer.chat_template)
        without_special_tokens = form is None or not form.in_special_tokens

        def decode(token_ids: list[int]) -> str | None:
            text = tokenizer.decode(token_ids, skip_special_tokens=without_special_tokens)
            return sent_back(str(text), form)

        return DialogueOptions(self._renderer(tokenizer), decode, self.seed, self.cut_loops)

    def _renderer(self, tokenizer: Any) -> Renderer:
        if self.raw:
            return raw_renderer(tokenizer)
        if not tokenizer.chat_template:
            raise DataError(f"{self.target} has no chat template", hint="add --raw")
        return chat_renderer(tokenizer, self.system, self.chat_template_kwargs)


def recorded_params(made_by: Mapping[str, Any]) -> SamplingParams:
    """How a dataset's answers were sampled; greedily where its manifest does not say."""
    known = {name: made_by[name] for name in SAMPLING if made_by.get(name) is not None}
    return SamplingParams(**{"temperature": 0.0, **known})
