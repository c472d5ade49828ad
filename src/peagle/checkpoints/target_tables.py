"""The target's two tables, which a compact head borrows and an exported one must bring along."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from peagle.checkpoints.files import iter_tensors
from peagle.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from peagle.models.target import TargetModel

EMBED, OUTPUT = "embed_tokens.weight", "lm_head.weight"


class TargetTables(NamedTuple):
    embed_tokens: Tensor  # [V, H]
    lm_head: Tensor  # [V, H]


def tables_of(target: TargetModel) -> TargetTables:
    return TargetTables(target.embed_tokens.weight, target.lm_head.weight)


def read_tables(folder: Path, shape: tuple[int, int]) -> TargetTables:
    """From a model folder, in the stored dtype; the rest of the model is not read."""
    found: dict[str, list[Tensor]] = {EMBED: [], OUTPUT: []}
    for name, tensor in iter_tensors(folder):
        for ending, tables in found.items():
            if name == ending or name.endswith("." + ending):
                tables.append(tensor)
    embeddings, outputs = found[EMBED], found[OUTPUT] or found[EMBED]  # tied: one is stored
    for ending, tables in ((EMBED, embeddings), (OUTPUT, outputs)):
        plain = [t for t in tables if t.is_floating_point() and t.shape == shape]
        if len(tables) != 1 or not plain:
            raise ModelError(
                f"{folder} does not hold one plain {ending} of {shape[0]} x {shape[1]}",
                hint="a head borrows this table: give the target as it was trained",
            )
    return TargetTables(embeddings[0], outputs[0])
