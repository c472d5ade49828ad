"""A head -> a folder that vLLM or the speculators library loads as it is."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoints.builtin import BUILTIN_MODELS
from peagle.checkpoints.files import WEIGHTS, read_json
from peagle.checkpoints.heads.checks import check_complete, check_vllm_runs
from peagle.checkpoints.heads.config import as_head_errors, read_head_config
from peagle.checkpoints.heads.layouts import CONFIG, ForeignLayout, layout_of
from peagle.checkpoints.heads.references import resolve_head
from peagle.checkpoints.heads.speculators_layout import wrap
from peagle.checkpoints.heads.tensors import (
    read_head_tensors,
    speculators_tensors,
    target_ids,
    vllm_tensors,
)
from peagle.checkpoints.heads.vllm_layout import write_options
from peagle.checkpoints.references import load_config, load_tokenizer, resolve_model
from peagle.checkpoints.targets import eos_token_ids, read_tables
from peagle.errors import HeadError, PeagleError
from peagle.files import atomic_folder, writing
from peagle.models.head_config import HeadConfig


def export_head(
    reference: str,
    target: str,
    out: Path,
    layout: ForeignLayout,
    *,
    mask_token_id: int | None = None,
    force: bool = False,
) -> None:
    """Writes the head `reference` for the model `target` into the folder `out`, whole or not.

    `mask_token_id` None: the id that the head names, else an id that text never has. `force`
    replaces a head that lies in `out`. A correction stays behind: neither layout has one.
    """
    _refuse_full_folder(out, force)
    folder, target_folder = resolve_head(reference), resolve_model(target)
    config = dataclasses.replace(read_head_config(folder), correction_size=None)
    sizes = load_config(target_folder).get_text_config()
    check_vllm_runs(config, sizes, layout)
    tables = read_tables(target_folder, (config.vocab_size, config.target_hidden_size))
    with as_head_errors():
        tensors = read_head_tensors(folder, config, tables)
    ids = target_ids(config, tensors.pop("d2t", None), folder)
    check_complete(config, tensors, folder)

    mask = _mask_token(config, mask_token_id, target_folder, ids)
    options = write_options(config, mask, _positions(config, sizes))
    written = vllm_tensors(config, tensors, tables, ids, mask)
    if layout == "speculators":
        verifier = _verifier(target, target_folder, sizes)
        options = wrap(options, config.method, config.num_speculative_tokens, verifier)
        written |= speculators_tensors(config, written, ids)
    with writing(out):
        _write(out, options, written)


def _refuse_full_folder(out: Path, force: bool) -> None:
    if not os.path.exists(out):
        return
    if not out.is_dir():
        raise HeadError(f"{out} is a file", hint="name a folder that does not exist yet")
    if not any(out.iterdir()) or (force and _is_head(out)):
        return
    hint = "--force replaces a head's folder and no other" if force else "name another, or --force"
    raise HeadError(f"{out} is not empty", hint=hint)


def _is_head(folder: Path) -> bool:
    """A model's folder has a config.json, too."""
    try:
        layout_of(read_json(folder / CONFIG), str(folder))
    except PeagleError:
        return False
    return True


def _mask_token(
    config: HeadConfig, asked: int | None, target_folder: Path, ids: Tensor
) -> int | None:
    if config.method != "p-eagle":
        if asked is not None:
            raise HeadError("an EAGLE-3 head has no mask", hint="drop --mask-token-id")
        return None
    if asked is None and config.mask_token_id is None:
        drafted = set(ids.tolist()) if config.reduced_vocabulary else set()
        return choose_mask_token(target_folder, config.vocab_size, drafted)
    chosen = config.mask_token_id if asked is None else asked
    assert chosen is not None
    if not 0 <= chosen < config.vocab_size:
        raise HeadError(
            f"the mask token id {chosen} is not in the vocabulary",
            hint=f"use an id below {config.vocab_size}",
        )
    return chosen


def _positions(config: HeadConfig, target: Any) -> int:
    """At least the target's context: vLLM drafts nothing beyond the head's, and does not say so."""
    ours, rope = config.max_position_embeddings, config.rope_parameters
    if rope.get("rope_type") == "yarn" and "original_max_position_embeddings" not in rope:
        return ours  # its frequencies follow from this number
    return max(ours, int(target.max_position_embeddings))


def _verifier(target: str, folder: Path, sizes: Any) -> dict[str, Any]:
    """A name that vLLM can resolve too: the hub's, or a full path."""
    is_local = target in BUILTIN_MODELS or os.path.isdir(Path(target).expanduser())
    name = str(folder.resolve()) if is_local else target
    return {"name_or_path": name, "architectures": list(sizes.architectures or ())}


def _write(out: Path, options: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    floats = (tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    widest = str(functools.reduce(torch.promote_types, floats)).removeprefix("torch.")
    options = {**options, "torch_dtype": widest}
    with atomic_folder(out) as temporary:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(options, indent=2) + "\n"
        (temporary / CONFIG).write_text(text, encoding="utf-8")


def choose_mask_token(folder: Path, vocab_size: int, drafted: Collection[int]) -> int:
    """The best id that the tokenizer in `folder` gives to no text. `drafted`: ids seen in training.

    vLLM reads the mask embedding from the head's table, which also serves real tokens: a token
    that has the mask's row is drafted after as if it were unknown. So text must never have it.
    First an id that the tokenizer does not have at all (tables are often padded), else a special
    token without a task: reserved ones by name, then those never seen, then the highest.
    """
    tokenizer: Any = load_tokenizer(folder)
    absent = set(range(vocab_size)) - set(tokenizer.get_vocab().values())
    if absent:
        return max(absent)
    idle = _idle_special_tokens(tokenizer, set(eos_token_ids(folder)))
    if not idle:
        raise HeadError(
            f"the tokenizer in {folder} has no unused id for the mask",
            hint="name one that never occurs in your text: --mask-token-id ID",
        )
    return max(idle, key=lambda i: (_is_reserved(idle[i]), i not in drafted, i))


def _idle_special_tokens(tokenizer: Any, end_ids: set[int]) -> dict[int, str]:
    """Special tokens that neither the tokenizer, the chat template nor the end of text uses."""
    roles = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    busy = {getattr(tokenizer, role, None) for role in roles} | end_ids
    template = str(tokenizer.chat_template or "")
    return {
        number: token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and number not in busy and token.content not in template
    }


def _is_reserved(content: str) -> bool:
    return any(word in content.lower() for word in ("reserved", "unused", "mask"))
