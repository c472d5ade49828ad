"""The tensors of a model folder under our names and in our shapes.

Families name the same things differently, and some store experts transposed or interleaved.
MXFP4 (GPT-OSS) and FP8 weights become plain ones of the dtype asked for, a tensor at a time; those
of experts that are to stay low-bit, values and scales, are handed on as they are.

Shapes: E experts, O outputs, I inputs of a product.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from peagle.checkpoints.files import iter_tensors, tensor_names
from peagle.errors import ModelError
from peagle.kernels.reference.experts import LowBitForm, expand_fp8, expand_mxfp4
from peagle.kernels.reference.fp8 import FP8

logger = logging.getLogger(__name__)

# Stored name -> ours, each pattern in turn.
RENAMED = [
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"^(model\.language_model|language_model\.model|model)\.", ""),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.mlp\.(gate|router)\.(weight|bias)$", r".mlp.router.proj.\2"),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        # Gemma-4 has its mixture beside the MLP.
        (r"^(layers\.\d+)\.(router|experts)\.", r"\1.moe.\2."),
        (r"^(layers\.\d+)\.(pre|post)_feedforward_layernorm_2\.", r"\1.moe.\2_norm."),
    )
]
# What the text model of a multimodal one does without, and what old checkpoints store needlessly.
UNUSED = re.compile(
    r"(^|\.)(vision_tower|vision_model|multi_modal_projector|embed_vision|audio_tower|embed_audio)"
    r"\.|rotary_emb\.inv_freq$|\.(input_scale|activation_scale)$"
)
# Behind the name of an 8-bit weight: its scales, of blocks or of outputs.
FP8_SCALES = ("_scale_inv", "_scale")
BLOCKS, SCALES = "_blocks", "_scales"
EXPERT_WEIGHT = re.compile(r"\.experts\.\d+\.\w+\.weight$")


def stored_tensors(
    folder: Path,
    family: str,
    dtype: torch.dtype,
    *,
    tied: bool,
    experts: LowBitForm | None = None,  # which they keep
) -> Iterator[tuple[str, Tensor]]:
    """Each once; of tied tables the embedding alone."""
    tables = []
    for name, tensor in _expanded(folder, dtype, keeps_experts=experts is not None):
        if UNUSED.search(name):
            continue
        from_blocks = name.endswith((BLOCKS, SCALES))
        name = our_name(_low_bit_name(name) if experts else name.removesuffix(BLOCKS))
        if family == "gpt_oss" and ".experts." in name:
            tensor = _gpt_oss_experts(name, tensor, from_blocks)
        if tied and name in ("embed_tokens.weight", "lm_head.weight"):
            tables.append(tensor)
        if not (tied and name == "lm_head.weight"):
            yield name, tensor
    if len(tables) == 2 and not torch.equal(*tables):  # transformers would not tie them
        raise ModelError(
            f"{folder} has an lm_head.weight of its own, but its config.json ties it",
            hint='set "tie_word_embeddings" to false in config.json',
        )


def stores_experts_as(form: LowBitForm, folder: Path) -> bool:
    """Whether the folder holds what its config says."""
    names = set(tensor_names(folder))
    if form.kind == "mxfp4":
        return any(name.endswith(BLOCKS) for name in names)
    weights = {name for name in names if EXPERT_WEIGHT.search(name)}
    return bool(weights) and {name + FP8_SCALES[0] for name in weights} <= names


def _low_bit_name(name: str) -> str:
    """MXFP4's products have all experts in one tensor: `LowBitMatrices` has names for its two."""
    for ending, ours in ((BLOCKS, ".values"), (SCALES, ".scales")):
        if name.endswith(ending):
            return name.removesuffix(ending) + ours
    return name


def our_name(name: str) -> str:
    for pattern, ours in RENAMED:
        name = pattern.sub(ours, name)
    return name


def _expanded(
    folder: Path, dtype: torch.dtype, *, keeps_experts: bool
) -> Iterator[tuple[str, Tensor]]:
    """The folder's tensors; weights that have scales, without them."""
    if not any(map(_is_scales, tensor_names(folder))):
        yield from iter_tensors(folder)
        return
    scales = {name: tensor for name, tensor in iter_tensors(folder) if _is_scales(name)}
    stored = expanded = 0
    for name, tensor in iter_tensors(folder):
        if keeps_experts and ".experts." in name:
            yield name, tensor.flatten(-2) if name.endswith(BLOCKS) else tensor
            continue
        if name in scales:
            continue
        plain = _expand(name, tensor, scales, dtype)
        if plain is not tensor:
            stored += tensor.numel() * tensor.itemsize
            expanded += plain.numel() * plain.itemsize
        yield name, plain
    if expanded:
        logger.warning(
            "%s: %.1f GiB of low-bit weights were expanded to %.1f GiB of %s",
            *(folder, stored / 2**30, expanded / 2**30, str(dtype).removeprefix("torch.")),
        )


def _is_scales(name: str) -> bool:
    is_fp8 = any(name.endswith(f".weight{ending}") for ending in FP8_SCALES)
    return is_fp8 or name.endswith(SCALES)


def _expand(name: str, tensor: Tensor, scales: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    if name.endswith(BLOCKS):
        own = scales.get(name.removesuffix(BLOCKS) + SCALES)
        if own is None:
            raise _without_scales(name)
        return expand_mxfp4(tensor, own, dtype)
    for ending in FP8_SCALES:
        if (own := scales.get(name + ending)) is not None:
            return expand_fp8(tensor, own, dtype)
    if tensor.dtype == FP8:  # others of the folder have them
        raise _without_scales(name)
    return tensor


def _without_scales(name: str) -> ModelError:
    return ModelError(f"{name} has no scales", hint="copy the folder again")


def _gpt_oss_experts(name: str, tensor: Tensor, from_blocks: bool) -> Tensor:
    """Gates and ups alternate, and plain products are stored as [E, I, O]."""
    if tensor.dim() == 3 and not from_blocks:
        tensor = tensor.transpose(1, 2)
    if "gate_up_proj" in name:
        tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)
    return tensor
