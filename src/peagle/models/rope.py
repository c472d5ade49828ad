"""Inverse frequencies of rotary embeddings, in the words and to the bit of transformers.

Ours, because transformers' own stand beside its models, and importing those takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from peagle.errors import ModelError

# Their inverse frequencies do not depend on the sequence length, so one table serves all steps.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


def rope_parameters(
    parameters: Mapping[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int,
    partial: bool = False,
) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the scale of cos and sin.

    `partial`: of a family whose `partial_rotary_factor` counts; fewer frequencies, then, turn the
    first dimensions alone. Of type "proportional" the others have the frequency 0.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))  # the older word
    if kind not in STATIC_ROPE_TYPES:
        raise ModelError(
            f"rope type {kind!r} is not supported",
            hint=f"supported: {', '.join(STATIC_ROPE_TYPES)}",
        )
    turning = parameters.get("partial_rotary_factor", 1.0)
    if kind not in ("default", "proportional") and turning != 1.0:
        raise ModelError("a partial_rotary_factor is not supported", hint="1.0 is")
    if kind == "default" and partial:
        head_dim = int(head_dim * turning)
    given = {"original_max_position_embeddings": max_position_embeddings, **parameters}
    try:
        wavelengths = given["rope_theta"] ** (_even_numbers(head_dim) / head_dim)
        if kind == "proportional":
            return _proportional(1.0 / wavelengths, given), 1.0
        if kind == "linear":
            return 1.0 / wavelengths / given["factor"], 1.0
        if kind == "llama3":
            return _llama3(1.0 / wavelengths, given), 1.0
        if kind == "yarn":
            factor = given["factor"]
            if factor is None:
                factor = max_position_embeddings / given["original_max_position_embeddings"]
            return _yarn(wavelengths, factor, given), _yarn_scale(factor, given)
        return 1.0 / wavelengths, 1.0
    except KeyError as error:
        raise ModelError(f"rope_parameters of type {kind} lack {error.args[0]}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"cannot use rope_parameters {dict(parameters)}: {error}") from error


def _even_numbers(head_dim: int) -> Tensor:
    # A real device even while modules are made on meta.
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")


def _proportional(inverse: Tensor, given: Mapping[str, Any]) -> Tensor:
    """A share of all frequencies; the rest do not turn."""
    turning = int(given.get("partial_rotary_factor", 1.0) * 2 * len(inverse) // 2)
    stretched = inverse / given.get("factor", 1.0)
    return torch.cat((stretched[:turning], torch.zeros_like(inverse[turning:])))


def _llama3(inverse: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Waves longer than the original context are stretched, short ones kept, others blended."""
    factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    context = given["original_max_position_embeddings"]
    length = 2 * math.pi / inverse
    is_long, is_short = length > context / low, length < context / high
    kept = (context / length - low) / (high - low)
    blended = (1 - kept) * inverse / factor + kept * inverse
    return torch.where(is_long, inverse / factor, torch.where(is_short, inverse, blended))


def _yarn(wavelengths: Tensor, factor: float, given: Mapping[str, Any]) -> Tensor:
    """Dimensions that turn often keep their frequency, those that turn seldom are stretched."""
    dims, base = 2 * len(wavelengths), given["rope_theta"]
    context = given["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """The one that turns so often within the original context."""
        return (dims * math.log(context / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension(given.get("beta_fast") or 32), dimension(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    places = torch.arange(len(wavelengths), dtype=torch.float32, device="cpu")
    kept = 1 - ((places - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_scale(factor: float, given: Mapping[str, Any]) -> float:
    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    numerator, denominator = given.get("mscale"), given.get("mscale_all_dim")
    if numerator and denominator:
        return growth(numerator) / growth(denominator)
    return growth(1)
