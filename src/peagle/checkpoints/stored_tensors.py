"""The tensors of a model folder under our names, in our shapes, and without low-bit forms.

Families name the same things differently, and some store experts transposed or interleaved.
MXFP4 (GPT-OSS) and FP8 weights become plain ones of the dtype asked for, a tensor at a time.

Shapes: E experts, O outputs, I inputs of a product.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from peagle.checkpoints.files import iter_tensors, tensor_names
from peagle.errors import ModelError

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
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCKS, SCALES = "_blocks", "_scales"


def stored_tensors(
    folder: Path, family: str, dtype: torch.dtype, *, tied: bool
) -> Iterator[tuple[str, Tensor]]:
    """Each once; of tied tables the embedding alone."""
    tables = []
    for name, tensor in _expanded(folder, dtype):
        if UNUSED.search(name):
            continue
        from_blocks = name.endswith(BLOCKS)
        name = our_name(name.removesuffix(BLOCKS))
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


def our_name(name: str) -> str:
    for pattern, ours in RENAMED:
        name = pattern.sub(ours, name)
    return name


def _expanded(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The folder's tensors; weights that have scales, without them."""
    if not any(map(_is_scales, tensor_names(folder))):
        yield from iter_tensors(folder)
        return
    scales = {name: tensor for name, tensor in iter_tensors(folder) if _is_scales(name)}
    stored = expanded = 0
    for name, tensor in iter_tensors(folder):
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
            raise ModelError(f"{name} has no scales", hint="copy the folder again")
        return expand_mxfp4(tensor, own, dtype)
    for ending in FP8_SCALES:
        if (own := scales.get(name + ending)) is not None:
            return expand_fp8(tensor, own, dtype)
    return tensor


def expand_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks [E, O, G, 16], two values a byte, the lower half first; scales [E, O, G], as powers
    of two of the 32 values of a block -> [E, O, G * 32]."""
    values = torch.tensor([*FP4_VALUES, *(-x for x in FP4_VALUES)], dtype=torch.float32)
    experts, outputs, groups, half = blocks.shape
    out = torch.empty(experts, outputs, groups * half * 2, dtype=dtype)
    for expert in range(experts):  # one at a time: a whole layer in float32 is gigabytes
        packed = blocks[expert].int()
        pairs = torch.stack((values[packed & 15], values[packed >> 4]), dim=-1)
        exponents = scales[expert].int() - 127
        out[expert] = torch.ldexp(pairs.flatten(-2), exponents[..., None]).flatten(-2)
    return out


def expand_fp8(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [O, I], scales of it all, of its outputs [O, 1] or of its blocks [O', I']."""
    scales = scales.float()
    for dim in range(scales.dim()):
        size, count = weight.shape[dim], scales.shape[dim]
        if count > 1:
            # Blocks are powers of two, of which the last may be cut off.
            block = 1 << (math.ceil(size / count) - 1).bit_length()
            scales = scales.repeat_interleave(block, dim).narrow(dim, 0, size)
    return (weight.float() * scales).to(dtype)


def _gpt_oss_experts(name: str, tensor: Tensor, from_blocks: bool) -> Tensor:
    """Gates and ups alternate, and plain products are stored as [E, I, O]."""
    if tensor.dim() == 3 and not from_blocks:
        tensor = tensor.transpose(1, 2)
    if "gate_up_proj" in name:
        tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)
    return tensor
