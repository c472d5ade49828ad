"""Where the target's hidden states come from. The trainer sees `Features` and asks no more."""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from peagle.data.packing import PackedRow
from peagle.models.masks import Elements
from peagle.models.target import TargetModel
from peagle.teacher_forcing.attention import attention_for


class Features(NamedTuple):
    """What the target knows of a packed row of n tokens, on the training device."""

    next_tokens: Tensor  # [n]: the token at slot + 1
    aux_hidden_states: Tensor  # [n, 3H]
    states: Tensor  # [n, H]: after the final norm, what its output table reads


class StoredStates(NamedTuple):
    """States of a packed row as they were read from disk, in main memory."""

    aux_hidden_states: Tensor  # [n, 3H]
    states: Tensor  # [n, H]


class PromisedStates(NamedTuple):
    """States that are still on their way, so that several packed rows can be asked for at once."""

    stored: StoredStates
    parts: list[Future[None]]  # each fills its share of `stored`

    def wait(self) -> StoredStates:
        for part in self.parts:
            part.result()
        return self.stored


Fetched = StoredStates | PromisedStates | None


class FeatureSource(Protocol):
    """Two halves: `fetch` runs ahead of the step, in another thread; the call is in the step."""

    def fetch(self, row: PackedRow) -> Fetched: ...

    def __call__(self, row: PackedRow, fetched: Fetched) -> Features: ...


class OnlineFeatures:
    """The target runs in this process, one pass per packed row, without gradients."""

    def __init__(self, target: TargetModel, aux_hidden_state_layers: tuple[int, ...]) -> None:
        self.target = target
        self.aux_hidden_state_layers = aux_hidden_state_layers
        windows = target.config.sliding_windows
        self.windows = tuple(dict.fromkeys(windows)) if windows else (None,)
        self.device = target.embed_tokens.weight.device

    def fetch(self, row: PackedRow) -> None:
        return None

    @torch.no_grad()
    def __call__(self, row: PackedRow, fetched: Fetched = None) -> Features:
        fields = (row.token_ids, row.document, row.position)
        tokens, document, position = (x.to(self.device, non_blocking=True) for x in fields)
        slot = torch.arange(len(tokens), device=self.device, dtype=torch.int32)
        elements = Elements(slot, torch.zeros_like(slot), document)
        attention = attention_for(elements, position, self.windows)
        output = self.target(tokens, position, attention, self.aux_hidden_state_layers)
        assert output.aux_hidden_states is not None
        return Features(tokens.roll(-1), output.aux_hidden_states, output.hidden)
