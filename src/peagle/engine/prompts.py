"""What a caller may give for a prompt, and the token ids it stands for. Both backends read here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams

Prompt = str | Mapping[str, Any]  # text, or {"prompt_token_ids": [...]} or {"prompt": text}
Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class TokenizedPrompt(NamedTuple):
    text: str | None
    token_ids: list[int]


class PromptReader:
    """Text, token ids and conversations -> token ids, by one model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def read(self, prompt: Prompt | Sequence[Message]) -> TokenizedPrompt:
        if isinstance(prompt, str):
            return TokenizedPrompt(prompt, self._encode(prompt))
        if not isinstance(prompt, Mapping):
            return self.read(self.render_chat(prompt))
        if "prompt_token_ids" in prompt:
            return TokenizedPrompt(prompt.get("prompt"), list(prompt["prompt_token_ids"]))
        if "prompt" in prompt:
            return TokenizedPrompt(prompt["prompt"], self._encode(prompt["prompt"]))
        raise RequestError(
            f"a prompt with keys {sorted(prompt)} has neither text nor token ids",
            hint='give text, {"prompt": text} or {"prompt_token_ids": [...]}',
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        content_format: str = "auto",
        kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt of token ids, ready for an answer unless `kwargs`, which the
        template sees, says otherwise. Templates get the parts of a content as one text; those
        that want a list do for content_format "openai"."""
        if chat_template is None and not self.tokenizer.chat_template:
            raise RequestError(
                "this model has no chat template", hint="call generate with a plain prompt"
            )
        as_text = content_format != "openai"
        options: dict[str, Any] = {"add_generation_prompt": True, **(kwargs or {})}
        try:
            text = self.tokenizer.apply_chat_template(
                [_text_message(message) if as_text else dict(message) for message in messages],
                chat_template=chat_template,
                tokenize=False,
                **options,
            )
        except (TemplateError, TypeError, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(
                f"the chat template refuses the messages: {error}", hint="check roles and contents"
            ) from error
        # The template writes its own special tokens; the tokenizer must not add them again.
        return {"prompt": text, "prompt_token_ids": self._encode(text, add_special_tokens=False)}

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids


def _text_message(message: Message) -> dict[str, Any]:
    """A message whose content is text: of parts as the OpenAI API has them, one line each."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return dict(message)
    texts = [part if isinstance(part, str) else _part_text(part) for part in parts]
    return {**message, "content": "\n".join(texts)}


def _part_text(part: Any) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
        raise RequestError(
            f"a message has a part of type {kind!r}, but only text can be read",
            hint='use {"type": "text", "text": "..."}',
        )
    return str(part["text"])


def params_for(
    prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One set of parameters per prompt."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(prompts)
    if len(given) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(given)} sampling params")
    return list(given)


def check_tokens(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int,
) -> None:
    """Raises RequestError if no engine of these sizes could ever serve the prompt."""
    if not prompt_token_ids:
        raise RequestError("the prompt is empty", hint="give at least one token")
    if len(prompt_token_ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt_token_ids)} tokens, the context {max_model_len}",
            hint="shorten the prompt, or raise max_model_len if the model allows",
        )
    named = [*prompt_token_ids, *params.logit_bias, *params.stop_token_ids]
    if min(named) < 0 or max(named) >= vocab_size:  # quicker than to look at each
        wrong = next(t for t in named if not 0 <= t < vocab_size)
        raise RequestError(
            f"token id {wrong} is not in the vocabulary of {vocab_size}",
            hint="was the text tokenized for another model?",
        )
