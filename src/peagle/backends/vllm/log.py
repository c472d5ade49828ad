"""The one line of vLLM's log that says why it died."""

from __future__ import annotations

import re
from collections.abc import Iterable

# `(EngineCore pid=77) ERROR 10-01 12:00:00 [core.py:9] ` before the message.
_PREFIX = re.compile(
    r"^(?:\x1b\[[\d;]*m)*(?:\([^)]*pid=\d+\)(?:\x1b\[[\d;]*m)*\s?)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]\s?)?"
)
_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|NotFound)(?::|$)")
_USAGE = re.compile(r"(?:vllm|api_server\.py)[\w. ]*: error: ")
_BECAUSE = re.compile(r"\s+(?:Value error|Assertion failed), ")  # pydantic's own line of reason
# These only say that another process failed; its own words stand before them.
_WRAPPERS = ("Engine core initialization failed", "WorkerProc initialization failed", "See root")
LONGEST = 400


def last_words(log: Iterable[str]) -> str:
    """The root error if the log has one, else its last line with something in it."""
    lines = [_PREFIX.sub("", line.rstrip()) for line in log]
    for reason in (_usage_error, _root_error):
        if found := reason(lines):
            return _short(found)
    printed = [line.strip() for line in lines if line.strip()]
    return _short(printed[-1]) if printed else "its log is empty"


def _usage_error(lines: list[str]) -> str | None:
    found = [line for line in lines if _USAGE.match(line)]
    return found[-1].split("error: ", 1)[1] if found else None


def _root_error(lines: list[str]) -> str | None:
    """Chained tracebacks tell the cause first."""
    for index, line in enumerate(lines):
        if _RAISED.match(line) and not any(words in line for words in _WRAPPERS):
            return _with_reason(line, lines[index + 1 : index + 4])
    return None


def _with_reason(line: str, following: list[str]) -> str:
    """pydantic counts its errors in the first line and gives the reason in the next."""
    for reason in following:
        if _BECAUSE.match(reason):
            return reason.split(", ", 1)[1].split(" [type=")[0]
    return line


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
