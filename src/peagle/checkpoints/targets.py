"""A model folder -> the native target, whole or without its layers, or its two tables alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peagle.checkpoints.decoder_configs import read_decoder_config
from peagle.checkpoints.files import iter_tensors, read_json
from peagle.checkpoints.references import first_line, load_config
from peagle.checkpoints.stored_tensors import our_name, stored_tensors, stores_experts_as
from peagle.checkpoints.weights import load_weights
from peagle.errors import ModelError, PeagleError
from peagle.kernels.cpu.linear import Weight
from peagle.models.config import SUPPORTED_MODEL_TYPES, DecoderConfig
from peagle.models.experts import has_low_bit_kernel
from peagle.models.layers import matrix_of
from peagle.models.meta import on_meta
from peagle.models.target import TargetModel

logger = logging.getLogger(__name__)

EMBED, OUTPUT = "embed_tokens.weight", "lm_head.weight"
LAYERLESS = {EMBED, "norm.weight", OUTPUT}


def load_target(folder: Path, *, dtype: torch.dtype, device: torch.device) -> TargetModel:
    """Low-bit experts stay so where there is a kernel for them."""
    config = read_decoder_config(folder)
    form = None if config.experts is None else config.experts.low_bit
    if form and not (has_low_bit_kernel(form, device) and stores_experts_as(form, folder)):
        form = None
    with on_meta():
        target = TargetModel(config.with_experts_as(form))
    _move_rotaries(target, device)
    load_weights(
        target,
        stored_tensors(
            folder, _family(folder), dtype, tied=config.tie_word_embeddings, experts=form
        ),
        error=ModelError,
        source=str(folder),
        dtype=dtype,
        device=device,
    )
    return target.eval()


def has_native_target(folder: Path) -> bool:
    """Whether there is a native target for all that the folder's config asks for."""
    try:
        read_decoder_config(folder)
    except ModelError:
        return False
    return True


def load_adapted(folder: Path, *, dtype: torch.dtype, device: torch.device) -> TargetModel:
    """Any other causal language model, by transformers' own modules."""
    from transformers import AutoModelForCausalLM

    from peagle.models.adapter import TransformersTarget, adapted_config

    config = load_config(folder)
    sizes = adapted_config(config)
    try:
        options = {"trust_remote_code": False, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
        model.to(device).requires_grad_(False).eval()
        target = TransformersTarget(model, sizes).eval()
    except PeagleError:
        raise
    except Exception as error:  # transformers raises whatever the folder's content leads to
        raise ModelError(
            f"model type {config.model_type!r} has no native implementation, and transformers "
            f"cannot run it: {first_line(error)}",
            hint=f"native: {', '.join(SUPPORTED_MODEL_TYPES)}",
        ) from error
    logger.warning(
        "model type %s has no native implementation: it runs by transformers' modules, which is "
        "slower%s",
        config.model_type,
        "" if target.rolls_back else ", and computes the whole text again at every step",
    )
    return target


def load_layerless(folder: Path, *, dtype: torch.dtype, device: torch.device) -> TargetModel:
    """A TargetModel with an empty `layers`: the embedding, the final norm and the output table.

    Enough to train a head where another process computes the hidden states; a target of 140 GB
    then costs a few. Asking it for aux_hidden_states is an error.
    """
    config = DecoderConfig.from_transformers(load_config(folder))
    with on_meta():
        target = TargetModel(config)
        target.layers = nn.ModuleList()
    _move_rotaries(target, device)
    tensors = _stored_without_layers(folder, config.tie_word_embeddings)
    load_weights(target, tensors, error=ModelError, source=str(folder), dtype=dtype, device=device)
    return target.eval()


def _move_rotaries(target: TargetModel, device: torch.device) -> None:
    """Their tables are real while the rest is on meta, and keep their dtype."""
    for rotary in (target.rotary, target.full_rotary):
        if rotary is not None:
            rotary.to(device)


def _family(folder: Path) -> str:
    return str(read_json(folder / "config.json").get("model_type"))


class TargetTables(NamedTuple):
    """What a compact head borrows from its target, and an exported one must bring along."""

    embed_tokens: Tensor  # [V, H]
    lm_head: Weight  # [V, H]


def tables_of(target: TargetModel) -> TargetTables:
    return TargetTables(target.embed_tokens.weight, matrix_of(target.lm_head))


def read_tables(folder: Path, shape: tuple[int, int]) -> TargetTables:
    """The tables of a model folder, in the stored dtype; the rest of the model is not read."""
    found: dict[str, list[Tensor]] = {EMBED: [], OUTPUT: []}
    for name, tensor in iter_tensors(folder):
        for ending, tables in found.items():
            if name == ending or name.endswith("." + ending):
                tables.append(tensor)
    embeddings, outputs = found[EMBED], found[OUTPUT] or found[EMBED]  # tied: one is stored
    for ending, tables in ((EMBED, embeddings), (OUTPUT, outputs)):
        fitting = [t for t in tables if t.is_floating_point() and t.shape == shape]
        if len(tables) != 1 or not fitting:
            raise ModelError(
                f"{folder} does not hold one unquantized {ending} of {shape[0]} x {shape[1]}",
                hint="a head borrows this table: give the target as it was trained",
            )
    return TargetTables(embeddings[0], outputs[0])


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json's, which may be several, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ids = read_json(folder / name).get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _stored_without_layers(folder: Path, tied: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in iter_tensors(folder):
        ours = our_name(name)
        if ours in LAYERLESS and not (tied and ours == OUTPUT):
            yield ours, tensor
