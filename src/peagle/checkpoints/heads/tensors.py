"""A head's tensors between the layouts: under our network's names, and as vLLM and the
speculators library want them.

In vLLM's layouts the mask embedding is a row of the embedding table, and a head that we exported
brings copies of the target's tables along. Reading makes the row `mask_embedding` again, compares
the copies with the target's and drops them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from peagle.checkpoints.files import iter_tensors, read_json, read_tensors
from peagle.checkpoints.heads.layouts import CONFIG, layout_of
from peagle.checkpoints.targets import EMBED, OUTPUT, TargetTables
from peagle.errors import HeadError
from peagle.kernels.cpu.linear import rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from peagle.models.head_config import HeadConfig

CORRECTION = "correction.safetensors"
CORRECTION_PREFIX = "correction."  # of its tensors' names
CORRECTED_HEAD = "head"  # in its metadata: the fingerprint of the head that it was trained on
ROWS_AT_ONCE = 8192  # of a table that is compared: bounds the memory
_UNUSED = re.compile(r"layers\.[1-9]\d*\.hidden_norm\.weight")  # vLLM has them and never uses them


def read_head_tensors(folder: Path, config: HeadConfig, tables: TargetTables) -> dict[str, Tensor]:
    """Tensors under our names, as stored; `d2t` among them."""
    stored = dict(iter_tensors(folder))
    if layout_of(read_json(folder / CONFIG), str(folder / CONFIG)) == "native":
        return stored if config.correction_size is None else _with_correction(stored, folder)
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in stored.items()
        if not _UNUSED.fullmatch(name)
    }
    if len(tensors) < len([n for n in stored if not _UNUSED.fullmatch(n)]):
        raise HeadError(f"{folder} holds layer 0 twice, once as midlayer")
    ids = target_ids(config, tensors.get("d2t"), folder)
    _check_t2d(tensors.pop("t2d", None), ids, config, folder)
    if config.method == "p-eagle":
        _take_mask(tensors, config, tables, folder)
    if not config.has_embed_tokens and EMBED in tensors:
        _drop_copy(tensors, EMBED, tables.embed_tokens, config.mask_token_id, folder)
    if not config.has_lm_head and OUTPUT in tensors:
        rows = rows_of(tables.lm_head, ids.to(tables.embed_tokens.device))
        _drop_copy(tensors, OUTPUT, rows, None, folder)
    return tensors


def _with_correction(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    path = folder / CORRECTION
    metadata, corrections = read_tensors(path)
    if metadata.get(CORRECTED_HEAD) != fingerprint(tensors):
        raise HeadError(
            f"{path} was trained on another head than the one beside it",
            hint="train the correction again, or set correction_size to null in config.json",
        )
    return tensors | corrections


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Tells heads apart, whichever precision they are stored in."""
    weight = tensors["fc.weight"].to(torch.bfloat16).contiguous()
    return hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()


def target_ids(config: HeadConfig, d2t: Tensor | None, folder: Path) -> Tensor:
    """[Vd]: the target's id of each draft id."""
    identity = torch.arange(config.draft_vocab_size)
    if not config.reduced_vocabulary:
        if d2t is not None and bool(d2t.any()):
            raise HeadError(f"{folder} has d2t although its vocabulary is the target's")
        return identity
    if d2t is None:
        raise HeadError(f"{folder} lacks d2t, which its reduced vocabulary needs")
    if d2t.shape != identity.shape:
        raise HeadError(
            f"{folder}: d2t has shape {list(d2t.shape)}, expected {list(identity.shape)}"
        )
    if d2t.is_floating_point():
        raise HeadError(f"{folder}: d2t is {d2t.dtype}, expected integers")
    ids = identity + d2t
    in_range = bool(((ids >= 0) & (ids < config.vocab_size)).all())
    if not in_range or len(set(ids.tolist())) < len(ids):
        raise HeadError(f"{folder}: d2t does not map to distinct ids below {config.vocab_size}")
    return ids


def _check_t2d(t2d: Tensor | None, ids: Tensor, config: HeadConfig, folder: Path) -> None:
    """[V], true for the target's ids that have a draft id. It follows from d2t."""
    if t2d is None:
        return
    expected = torch.zeros(config.vocab_size, dtype=torch.bool)
    expected[ids] = True
    if t2d.shape != expected.shape or not torch.equal(t2d.bool(), expected):
        raise HeadError(f"{folder}: t2d does not mark the ids that d2t maps to")


def _take_mask(
    tensors: dict[str, Tensor], config: HeadConfig, tables: TargetTables, folder: Path
) -> None:
    table = tensors.get(EMBED, tables.embed_tokens)
    row = config.mask_token_id
    if row is None or not 0 <= row < len(table):
        raise HeadError(f"{folder}: the mask id {row} is not a row of the table of {len(table)}")
    tensors["mask_embedding"] = table[row].clone()
    if "mask_hidden" in tensors:  # [1, 3H] or [1, 1, 3H]; if it is missing, loading says so
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(-1)


def _drop_copy(
    tensors: dict[str, Tensor], name: str, original: Tensor, except_row: int | None, folder: Path
) -> None:
    copy = tensors.pop(name)
    if copy.shape != original.shape or not _same_rows(copy, original, except_row):
        raise HeadError(
            f"{folder}: {name} is marked as a copy of the target's, but the target has other rows",
            hint='use the target it was exported for, or delete "peagle" from its config.json',
        )


def _same_rows(copy: Tensor, original: Tensor, except_row: int | None) -> bool:
    for start in range(0, len(copy), ROWS_AT_ONCE):
        theirs = original[start : start + ROWS_AT_ONCE]
        same = (copy[start : start + ROWS_AT_ONCE].to(theirs) == theirs).all(dim=1)
        if except_row is not None and start <= except_row < start + len(same):
            same[except_row - start] = True
        if not bool(same.all()):
            return False
    return True


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
        written.setdefault(OUTPUT, rows_of(tables.lm_head, ids))
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
