"""Acceptance from a server's Prometheus page: vLLM's counters, before and after a run."""

from __future__ import annotations

import re

from peagle.backends.vllm.stats import PREFIX
from peagle.http import Endpoint, HttpClient, ServerError
from peagle.speculation.statistics import SpecDecodeStats

_LINE = re.compile(rf"^{PREFIX}(\w+?)_total(?:\{{(.*)\}})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


def read_metrics(endpoint: Endpoint) -> SpecDecodeStats | None:
    """The server's totals since it started; None where it shows none."""
    try:
        with HttpClient(endpoint) as http:
            return parse_metrics(http.get("/metrics").decode("utf-8", "replace"))
    except ServerError:
        return None


def parse_metrics(page: str) -> SpecDecodeStats | None:
    """Sums over the engines of a server. None if it does not speculate, or does not say."""
    stats, found = SpecDecodeStats(), False
    accepted: dict[int, int] = {}
    for name, labels, value in _LINE.findall(page):
        if name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            setattr(stats, name, getattr(stats, name) + int(float(value)))
            found = True
        elif name == "num_accepted_tokens_per_pos" and (match := _POSITION.search(labels)):
            position = int(match[1])
            accepted[position] = accepted.get(position, 0) + int(float(value))
    stats.num_accepted_tokens_per_pos = [accepted.get(n, 0) for n in range(len(accepted))]
    return stats if found else None


def difference(before: SpecDecodeStats | None, after: SpecDecodeStats | None) -> SpecDecodeStats:
    """What came between; empty where the server does not say. vLLM drafts K tokens at every
    step, so all positions were drafted as often, and reached where the one before was kept."""
    if before is None or after is None:
        return SpecDecodeStats()
    drafts = after.num_drafts - before.num_drafts
    if drafts < 0:  # it was started anew meanwhile
        return SpecDecodeStats()
    old = before.num_accepted_tokens_per_pos or [0] * len(after.num_accepted_tokens_per_pos)
    accepted = [b - a for a, b in zip(old, after.num_accepted_tokens_per_pos, strict=False)]
    return SpecDecodeStats(
        num_drafts=drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        num_draft_tokens_per_pos=[drafts] * len(accepted),
        num_reached_tokens_per_pos=[drafts, *accepted[:-1]] if accepted else [],
        num_accepted_tokens_per_pos=accepted,
    )
