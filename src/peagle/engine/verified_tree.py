"""The trees of drafts of one answer, each with the path that the target took: for a look at them.

An engine keeps no trees: a step's drafts are overwritten by the next. Here they are read between
two steps, which waits for the device, so nothing that is timed should run like this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.sampling_params import SamplingParams


class VerifiedTree(NamedTuple):
    """Nodes are counted from 1; 0 is the newest token."""

    num_outputs: int  # tokens of the answer before it, the newest included
    token_ids: list[int]  # of the nodes, the most probable path first
    parents: list[int]
    path: list[int]  # the nodes that were accepted, from the newest token on
    bonus: int | None  # the target's own token behind them; None: the answer had ended


def verified_trees(
    engine: Engine, prompt_token_ids: Sequence[int], params: SamplingParams
) -> list[VerifiedTree]:
    """Answers one prompt on an engine that has nothing else to do. None where drafts are chains."""
    assert not engine.has_unfinished, "requests of others run"
    if engine.runner.models.state.trees is None:
        return []
    request = engine.add_request("trees", prompt_token_ids, params, seed=params.seed or 0)
    drafted: dict[int, tuple[list[int], list[int]]] = {}  # by number of tokens: nodes, parents
    found: list[VerifiedTree] = []
    while engine.has_unfinished:
        drafted |= _drafted(engine, request)
        num_tokens, num_verified = request.num_tokens, request.stats.num_draft_tokens
        news = [new.token_ids for new in engine.step()]
        count = request.stats.num_draft_tokens - num_verified
        if news and count:
            nodes = (column[:count] for column in drafted[num_tokens])
            num_outputs = num_tokens - len(prompt_token_ids)
            found.append(_walked(num_outputs, *nodes, news[0]))
    return found


def _drafted(engine: Engine, request: Request) -> dict[int, tuple[list[int], list[int]]]:
    """What the next step is to verify, and where: the device may be a step ahead of the host."""
    state = engine.runner.models.state
    assert state.trees is not None
    slot = next((n for n, s in engine.scheduler.running.items() if s.request is request), None)
    if slot is None:
        return {}
    count = int(state.num_drafts[slot])
    nodes = state.drafts[slot, :count].tolist(), state.trees.parents[slot, :count].tolist()
    return {int(state.num_computed[slot]) + 1: nodes}


def _walked(
    num_outputs: int, token_ids: list[int], parents: list[int], written: list[int]
) -> VerifiedTree:
    """`written`: what the step gave."""
    path: list[int] = []
    for token in written:
        last = path[-1] if path else 0
        nodes = zip(token_ids, parents, strict=True)
        here = [n for n, node in enumerate(nodes, start=1) if node == (token, last)]
        if not here:
            return VerifiedTree(num_outputs, token_ids, parents, path, token)
        path += here
    return VerifiedTree(num_outputs, token_ids, parents, path, None)
