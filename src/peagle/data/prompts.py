"""Prompts that a target is to answer: jsonl files, folders of them, Hugging Face datasets.

A line has one of the keys `prompt` (text), `turns` (the user's texts of a conversation) and
`messages` (role and content; the assistant's are dropped, the target answers for itself). `id`
and `category` are kept where a line has them. Imports no torch.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from peagle.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz")
KEYS = "use prompt (text), messages (a list) or turns (a list of texts)"
Message = dict[str, Any]  # {"role": ..., "content": ...}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write one
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


@dataclass(frozen=True)
class Conversation:
    """What a user asks; the target's answers come between the turns."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    category: str = ""


class BadPrompt(NamedTuple):
    where: str
    error: str


class Prompts(NamedTuple):
    good: list[Conversation]
    bad: list[BadPrompt]
    num_repeated: int  # the same line again


def read_prompts(reference: str, *, split: str = "train", limit: int | None = None) -> Prompts:
    """All prompts of a file, a folder or a Hugging Face dataset; at most `limit` good ones."""
    found = Prompts([], [], 0)
    seen: dict[str, Conversation] = {}
    num_repeated = 0
    for where, line in _lines(reference, split):
        if limit is not None and len(found.good) >= limit:
            break
        try:
            conversation = parse(line)
            before = seen.setdefault(conversation.id, conversation)
            if before is conversation:
                found.good.append(conversation)
            elif before == conversation:
                num_repeated += 1
            else:
                raise DataError(f"id {conversation.id!r} was used before for another prompt")
        except DataError as error:
            found.bad.append(BadPrompt(where, error.message))
    if not found.good:
        reason = f"; {found.bad[0].where}: {found.bad[0].error}" if found.bad else ""
        raise DataError(f"{reference} holds no prompt{reason}", hint=KEYS)
    return found._replace(num_repeated=num_repeated)


def parse(line: bytes | dict[str, Any]) -> Conversation:
    """One line of a file, or one row of a dataset."""
    record = read_object(line) if isinstance(line, bytes) else line
    system, turns = _turns(record)
    if not turns or not all(turn.strip() for turn in turns):
        raise DataError("the prompt is empty")
    given = record.get("id")
    content = json.dumps([system, *turns])
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    name = str(given) if isinstance(given, str | int) and str(given) else digest
    return Conversation(name, turns, system, str(record.get("category") or ""))


def read_text(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start + 1} is not UTF-8", hint="convert the text to UTF-8"
        ) from None


def read_object(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(read_text(line))
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON: {error}", hint="one JSON object per line") from None
    if not isinstance(record, dict):
        raise DataError("not a JSON object", hint=KEYS)
    return record


def find_prompt(record: Mapping[str, Any]) -> tuple[Literal["prompt", "turns", "messages"], Any]:
    """The key that holds the prompt, and its value: a text, a list of texts, or a list."""
    if isinstance(record.get("prompt"), str):
        return "prompt", record["prompt"]
    turns = record.get("turns")
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        return "turns", turns
    if isinstance(record.get("messages"), list):
        return "messages", record["messages"]
    raise DataError(f"no prompt in it: {KEYS}")


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """The conversation's own system message, if it has one, wins."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _turns(record: dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The system message and the user's turns."""
    key, value = find_prompt(record)
    if key == "messages":
        return _from_messages(value)
    return None, (value,) if key == "prompt" else tuple(value)


def _from_messages(messages: list[Any]) -> tuple[str | None, tuple[str, ...]]:
    texts: dict[str, list[str]] = {"system": [], "user": [], "assistant": []}
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise DataError("a message has no content, or one that is not text")
        if message.get("role") not in texts:
            raise DataError(f"role {message.get('role')!r} is not one of {', '.join(texts)}")
        texts[message["role"]].append(message["content"])
    if len(texts["system"]) > 1:
        raise DataError("more than one system message")
    return texts["system"][0] if texts["system"] else None, tuple(texts["user"])


def _lines(reference: str, split: str) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    path = Path(reference).expanduser()
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.name.endswith(SUFFIXES))
        if not files:
            raise DataError(f"{path} holds no {' or '.join(SUFFIXES)} file")
        for file in files:
            yield from _file_lines(file)
    elif path.exists():
        yield from _file_lines(path)
    elif _HUB_ID.fullmatch(reference) and not reference.endswith(SUFFIXES):
        yield from hub_rows(reference, split)
    else:
        raise DataError(
            f"no prompts at {reference}",
            hint="give a .jsonl or .jsonl.gz file, a folder of them, or a Hugging Face dataset id",
        )


def _file_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for number, line in numbered_lines(file):
                yield f"{path.name}:{number}", line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def numbered_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, without their ends."""
    for number, line in enumerate(lines, 1):
        line = line.removeprefix(_BYTE_ORDER_MARK).rstrip(b"\r\n")
        if line.strip():
            yield number, line


def hub_rows(reference: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of `org/name` or `org/name:configuration`."""
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise DataError(
            f"{reference} is not a file, and reading a Hugging Face dataset needs `datasets`",
            hint="pip install datasets, or give a .jsonl file",
        ) from None
    name, _, configuration = reference.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split, streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"{reference}:{number}", dict(row)
    except Exception as error:  # the hub's own errors, the HTTP library's, the system's
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"cannot read the dataset {reference}: {reason}") from error
