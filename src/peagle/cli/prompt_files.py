"""Prompts from the command line and from files. A bad line is named; the others are kept."""

from __future__ import annotations

import gzip
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from peagle.data.prompts import (
    SUFFIXES,
    Message,
    find_prompt,
    numbered_lines,
    read_object,
    read_text,
)
from peagle.errors import ConfigError, DataError

STDIN = "-"
ROLES = ("system", "developer", "user", "assistant", "tool")  # of the OpenAI API


@dataclass(frozen=True)
class NamedPrompt:
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


Given = tuple[list[NamedPrompt], list[Failure]]  # what can be asked, and what cannot


def given_prompts(args: list[str], file: str | None) -> Given:
    """Prompts given as arguments or in a file; exactly one of the two."""
    if args and file is not None:
        raise ConfigError("PROMPT and --prompts-file were both given", hint="use one of the two")
    if file is not None:
        given = _parse_lines(_read(file), jsonl=file.endswith(SUFFIXES))
        if not any(given):
            raise ConfigError(f"--prompts-file {file} holds no prompt", hint="write one per line")
        return given
    if not args:
        raise ConfigError(
            "no prompt was given", hint="add one in quotes, or --prompts-file FILE ('-': stdin)"
        )
    given = ([], [])
    for number, text in enumerate(args, 1):
        _add(given, f"prompt {number}", text.encode("utf-8", "surrogateescape"), jsonl=False)
    return given


def _parse_lines(data: bytes, *, jsonl: bool) -> Given:
    """One prompt per line. JSON if `jsonl`, or if the first line looks it."""
    given: Given = ([], [])
    for number, line in numbered_lines(data.split(b"\n")):
        jsonl = jsonl or (not any(given) and line.lstrip().startswith(b"{"))
        _add(given, f"line {number}", line, jsonl=jsonl)
    return given


def _read(file: str) -> bytes:
    try:
        data = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
        data = gzip.decompress(data) if file.endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot read --prompts-file {file}: {reason}", hint="check the path"
        ) from None
    if b"\0" in data:
        raise ConfigError(f"--prompts-file {file} is not a text file", hint="one prompt per line")
    return data


def _add(given: Given, where: str, line: bytes, *, jsonl: bool) -> None:
    good, bad = given
    try:
        content = _from_json(line) if jsonl else read_text(line)
        _refuse_empty(content)
        good.append(NamedPrompt(where, content))
    except DataError as error:
        bad.append(Failure(where, error.message, error.hint))


def _from_json(line: bytes) -> str | list[Message]:
    """All messages, the assistant's included: they are the history. Of turns the first."""
    key, value = find_prompt(read_object(line))
    if key == "turns":
        return str(value[0]) if value else ""
    return str(value) if key == "prompt" else list(value)


def _refuse_empty(content: str | list[Message]) -> None:
    if not content or (isinstance(content, str) and not content.strip()):
        raise DataError("the prompt is empty", hint="write something, or drop it")
    for message in content if isinstance(content, list) else ():
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(
                "a message has no role or no content", hint='use {"role": "user", "content": "..."}'
            )
        if message["role"] not in ROLES:
            raise DataError(f"role {message['role']!r} is not one of {', '.join(ROLES)}")
