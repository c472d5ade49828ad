"""What `peagle doctor` says of one thing that it looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from peagle.errors import PeagleError

Level = Literal["error", "warning", "ok"]


class Finding(NamedTuple):
    level: Level
    check: str
    message: str
    hint: str | None = None


def graded(
    check: str, message: str, *, warning: bool, error: bool = False, hint: str | None = None
) -> Finding:
    """The worst that holds; the hint is for those who need one."""
    if error:
        return Finding("error", check, message, hint)
    return Finding("warning", check, message, hint) if warning else Finding("ok", check, message)


def guarded(check: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """What a check cannot even look at is a finding, too."""
    try:
        yield from findings
    except PeagleError as error:
        yield Finding("error", check, error.message, error.hint)
