"""Prompts from the command line and from files. A bad line is named; the others are kept."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from peagle.errors import ConfigError, RequestError

STDIN = "-"
KEYS = "use prompt (text), messages (a list) or turns (a list of texts)"
Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One prompt, and the name under which the user knows it ("line 3", "prompt 1")."""

    where: str
    content: str | list[Message]

    @property
    def messages(self) -> list[Message]:
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        return self.content


class Failure(NamedTuple):
    """A prompt that got no answer, and why."""

    where: str
    message: str
    hint: str | None = None


class Prompts(NamedTuple):
    good: list[Prompt]
    bad: list[Failure]


def read_prompts(args: list[str], file: str | None) -> Prompts:
    """Prompts given as arguments or in a file; exactly one of the two."""
    if args and file is not None:
        raise ConfigError("PROMPT and --prompts-file were both given", hint="use one of the two")
    if file is not None:
        return parse_lines(_read(file), jsonl=Path(file).suffix == ".jsonl")
    if not args:
        raise ConfigError(
            "no prompt was given", hint="add one in quotes, or --prompts-file FILE ('-': stdin)"
        )
    prompts = Prompts([], [])
    for number, text in enumerate(args, 1):
        _add(prompts, f"prompt {number}", text.encode("utf-8", "surrogateescape"), jsonl=False)
    return prompts


def parse_lines(data: bytes, *, jsonl: bool) -> Prompts:
    """One prompt per line, blank lines left out. JSON if `jsonl`, or if the first line looks it."""
    data = data.removeprefix(b"\xef\xbb\xbf")  # some editors' byte order mark
    jsonl = jsonl or data.lstrip().startswith(b"{")
    prompts = Prompts([], [])
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            _add(prompts, f"line {number}", line.rstrip(b"\r"), jsonl=jsonl)
    return prompts


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """The conversation's own system message, if it has one, wins."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read --prompts-file {file}: {error.strerror}", hint="check the path"
        ) from None


def _add(prompts: Prompts, where: str, line: bytes, *, jsonl: bool) -> None:
    try:
        text = line.decode("utf-8")
        content = _from_json(text) if jsonl else text
        _refuse_empty(content)
        prompts.good.append(Prompt(where, content))
    except UnicodeDecodeError as error:
        message = f"byte {error.start + 1} is not UTF-8"
        prompts.bad.append(Failure(where, message, "convert the text to UTF-8"))
    except RequestError as error:
        prompts.bad.append(Failure(where, error.message, error.hint))


def _from_json(line: str) -> str | list[Message]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON: {error}", hint="one JSON object per line") from None
    if not isinstance(value, dict):
        raise RequestError("not a JSON object", hint=KEYS)
    if isinstance(value.get("prompt"), str):
        return str(value["prompt"])
    if _is_list_of(dict, value.get("messages")):
        return list(value["messages"])
    if _is_list_of(str, value.get("turns")):
        return str(value["turns"][0])
    raise RequestError("no prompt in it", hint=KEYS)


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)


def _refuse_empty(content: str | list[Message]) -> None:
    if isinstance(content, str):
        if not content.strip():
            raise RequestError("the prompt is empty", hint="write something, or drop it")
        return
    for message in content:
        if not {"role", "content"} <= message.keys():
            raise RequestError(
                "a message has no role or no content", hint='use {"role": "user", "content": "..."}'
            )
