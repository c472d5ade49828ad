"""Texts, token ids and conversations of a request's body as token ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from jinja2 import Environment, TemplateSyntaxError, meta

from peagle.data.chat_formats import AnswerFormat, answer_format
from peagle.engine.prompts import PromptReader, TokenizedPrompt
from peagle.errors import RequestError
from peagle.server.errors import ApiError
from peagle.server.protocol import CompletionRequest, Message, Tool

LONG = 20_000  # characters or tokens: more than that must not hold up the event loop
MESSAGE = 20  # characters that a template writes around a message
# Variables of templates that are not for a request to set.
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception"}
RESERVED |= {"strftime_now", "namespace", "bos_token", "eos_token", "unk_token", "pad_token"}

_Result = TypeVar("_Result")


class PromptRenderer:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._reader = PromptReader(tokenizer)

    @cached_property
    def variables(self) -> set[str]:
        """Of the model's chat template."""
        template = self.tokenizer.chat_template
        if not isinstance(template, str):
            return set()
        try:
            syntax = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        except TemplateSyntaxError:  # with a block that only some know
            return {"tools"} if "tools" in template else set()
        return meta.find_undeclared_variables(syntax)

    @cached_property
    def answer_format(self) -> AnswerFormat | None:
        """What the model writes beside plain text."""
        return answer_format(self.tokenizer.chat_template)

    def check_tools(self, *, reads_marks: bool) -> None:
        """Tools need a template that shows them and, unless the form of the answer is set, one
        that says in a way we read how to call them."""
        if "tools" not in self.variables:
            raise ApiError(400, "the chat template of this model has no tools", param="tools")
        if reads_marks and self.answer_format is None:
            message = "how this model writes tool calls is not known: set tool_choice to required"
            raise ApiError(400, message, param="tools")

    async def completion(self, body: CompletionRequest) -> list[TokenizedPrompt]:
        given, adds_special = body.prompt, body.add_special_tokens is not False
        if isinstance(given, str):
            return [await self.encode(given, adds_special)]
        if given and isinstance(given[0], int):
            return [TokenizedPrompt(None, list(given))]
        prompts = []
        for one in given:
            if isinstance(one, str):
                prompts.append(await self.encode(one, adds_special))
            else:
                prompts.append(TokenizedPrompt(None, list(one)))  # type: ignore[arg-type]
        if not prompts:
            raise ApiError(400, "the prompt is empty", param="prompt")
        return prompts

    async def encode(self, text: str, add_special_tokens: bool) -> TokenizedPrompt:
        def encode() -> list[int]:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return ids

        return TokenizedPrompt(text, await _aside(len(text), encode))

    async def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        variables: Mapping[str, Any] | None,
    ) -> TokenizedPrompt:
        unknown = [name for name in variables or {} if name not in self.variables - RESERVED]
        if unknown:
            known = ", ".join(sorted(self.variables - RESERVED)) or "none"
            message = f"the chat template has no such variable; it has {known}"
            raise ApiError(400, message, param="chat_template_kwargs")
        options = dict(variables or {})
        if tools:
            options["tools"] = [tool.model_dump(exclude_unset=True) for tool in tools]
        shown = [_as_shown(message) for message in messages]
        length = sum(len(m["content"]) + len(m.get("reasoning", "")) + MESSAGE for m in shown)
        rendered = await _aside(length, lambda: self._render(shown, options))
        return self._reader.read(rendered)

    def _render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._reader.render_chat(messages, kwargs=options)
        except RequestError:
            raise
        except Exception as error:  # a template is a program that came with the model
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}",
                hint="check roles and contents",
            ) from error

    async def decode(self, token_ids: list[int]) -> str:
        text: str = await _aside(len(token_ids), lambda: self.tokenizer.decode(token_ids))
        return text

    async def decode_each(self, token_ids: list[int]) -> list[str]:
        decode = self.tokenizer.decode
        return await _aside(len(token_ids), lambda: [decode([token]) for token in token_ids])


async def _aside(length: int, work: Callable[[], _Result]) -> _Result:
    """In a thread where it takes long: the tokenizer lets others run meanwhile."""
    return await asyncio.to_thread(work) if length > LONG else work()


def _as_shown(message: Message) -> dict[str, Any]:
    """As templates expect messages: content is one text, arguments of calls are objects."""
    shown: dict[str, Any] = {"role": message.role, "content": _text(message)}
    reasoning = message.reasoning or message.reasoning_content
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    named |= {"reasoning": reasoning, "reasoning_content": reasoning}  # templates know either
    shown |= {name: value for name, value in named.items() if value is not None}
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return shown


def _text(message: Message) -> str:
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content)
    return message.content or ""


def _arguments(text: str) -> Any:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, "arguments of a tool call are not a JSON object", param="messages")
    return arguments
