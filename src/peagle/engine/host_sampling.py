"""What the host does with a step's logits: penalties and the like change them, logprobs read them.

A step with such requests is the same step, run eagerly: no CUDA graph can hold work on the host.

Shapes: B slots of the step, K draft tokens, R rows in all (1 + k each), V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.adjust import adjust_logits, needs_adjustment
from peagle.engine.request import Request, TokenLogprobs
from peagle.kernels.device_batch import StepCounts
from peagle.models.drafter import Packing
from peagle.models.output import OutputRows


class HostSampling:
    """Of one step whose slots hold these requests."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self._raw: list[Tensor] = []  # [1 + k, V] of each request, before any adjustment

    def adjusted(self, output: OutputRows, counts: StepCounts, packing: Packing) -> OutputRows:
        logits = output.logits()
        num_rows = counts.num_rows.tolist()
        width = counts.drafts.shape[1] + 1
        sizes = num_rows if packing.index is not None else [width] * len(num_rows)
        own = list(torch.split(logits, sizes))
        asked = range(len(self.requests))  # what is beyond only pads the batch
        self._raw = [own[n][: num_rows[n]] for n in asked]
        for n in asked:
            request, rows = self.requests[n], num_rows[n]
            if rows and needs_adjustment(request):
                changed = adjust_logits(self._raw[n], request, _paths(counts, n)[:rows])
                own[n] = torch.cat((changed, own[n][rows:]))
        return output._replace(values=torch.cat(own))

    def take_path(self, rows: list[list[int]]) -> None:
        """Of trees: the rows [B, K+1] that the target has taken, which are read from now on."""
        pairs = zip(self._raw, rows, strict=False)  # what is beyond only pads the batch
        self._raw = [raw[own] if len(raw) else raw for raw, own in pairs]

    def logprobs(self, n: int, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """Log-probabilities of the n-th request's new tokens before any adjustment, as vLLM
        reports them."""
        wanted = self.requests[n].params.logprobs
        return [] if wanted is None else raw_logprobs(self._raw[n], token_ids, wanted)


def _paths(counts: StepCounts, n: int) -> list[list[int]]:
    """The drafts before each row of the n-th slot."""
    drafts = counts.drafts[n].tolist()
    parents = range(len(drafts)) if counts.tree is None else counts.tree.parents[n].tolist()
    paths: list[list[int]] = [[]]
    for draft, parent in zip(drafts, parents, strict=True):
        paths.append([*paths[parent], draft])
    return paths


def raw_logprobs(logits: Tensor, token_ids: Sequence[int], wanted: int) -> list[TokenLogprobs]:
    """Of each token, and of the `wanted` best beside it.  # logits [n or more, V]"""
    log_probs = logits[: len(token_ids)].log_softmax(-1)  # [n, V]
    best = log_probs.topk(min(wanted, log_probs.shape[1]), dim=-1) if wanted else None
    out = []
    for row, token in enumerate(token_ids):
        chosen = log_probs[row, token]
        ids, values = [token], [chosen.item()]
        ranks = [int((log_probs[row] > chosen).sum()) + 1]
        if best is not None:
            ids += best.indices[row].tolist()
            values += best.values[row].tolist()
            ranks += range(1, len(best.indices[row]) + 1)
        out.append(TokenLogprobs(ids, values, ranks))
    return out
