"""A head's tensors as vLLM and the speculators library want them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.checkpoints.target_tables import EMBED, OUTPUT, TargetTables

if TYPE_CHECKING:
    from peagle.models.head_config import HeadConfig


def vllm_tensors(
    config: HeadConfig,
    tensors: dict[str, Tensor],
    tables: TargetTables,
    ids: Tensor,
    mask: int | None,
) -> dict[str, Tensor]:
    """vLLM's names. The embedding is always there: with pipeline parallelism vLLM shares none."""
    written = dict(tensors)
    table = written.get(EMBED, tables.embed_tokens)
    if mask is not None:
        table = _with_row(table, mask, written.pop("mask_embedding"))
        written["mask_hidden"] = written["mask_hidden"].view(1, -1)
    written[EMBED] = table
    if config.reduced_vocabulary:
        written["d2t"] = ids - torch.arange(len(ids))
        written.setdefault(OUTPUT, tables.lm_head[ids])
    return written


def _with_row(table: Tensor, row: int, values: Tensor) -> Tensor:
    """A copy, in a dtype that holds both exactly.

    The target's rows keep the dtype in which the target stores them: rounded to the head's
    bfloat16, a float32 run would draft from other embeddings than our engine does.
    """
    copy = table.to(torch.promote_types(table.dtype, values.dtype), copy=True)
    copy[row] = values
    return copy


def speculators_tensors(
    config: HeadConfig, written: dict[str, Tensor], ids: Tensor
) -> dict[str, Tensor]:
    """What the library holds in another shape, or besides; vLLM skips t2d."""
    more = {}
    if "mask_hidden" in written:
        more["mask_hidden"] = written["mask_hidden"].view(1, 1, -1)
    if config.reduced_vocabulary:
        more["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return more
