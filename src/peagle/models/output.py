"""The last rows of a model, before anybody has decided whether their logits are needed."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from peagle.kernels.cpu.linear import Weight
from peagle.kernels.policy import Policy


class OutputLayer(Protocol):
    """The end of a target or of a drafter's network."""

    policy: Policy

    @property
    def changes_logits(self) -> bool:
        """Whether `logits` are more than the product."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V]"""
        ...

    def output_product(self, hidden: Tensor) -> tuple[Tensor, Weight]:
        """Rows [R, H], normed, and the table [V, H]: `logits` are made of their product."""
        ...


class OutputRows(NamedTuple):
    hidden: Tensor  # [R, H], as `layer` takes them
    layer: OutputLayer
    ids: Tensor | None = None  # [V]: the target's id of each column, where they are not the same
    values: Tensor | None = None  # [R, V] logits that somebody has computed, and perhaps changed

    def logits(self) -> Tensor:
        return self.layer.logits(self.hidden) if self.values is None else self.values

    @property
    def greedy_without_logits(self) -> bool:
        """Where they are greedy."""
        if self.values is not None or self.layer.changes_logits:
            return False
        return self.layer.policy.greedy_without_logits(self.hidden)

    def product(self) -> tuple[Tensor, Weight]:
        return self.layer.output_product(self.hidden)
