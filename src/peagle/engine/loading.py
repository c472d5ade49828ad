"""References and options -> the objects an engine is made of."""

from __future__ import annotations

from pathlib import Path

import torch

from peagle.checkpoints.heads.loading import load_head
from peagle.checkpoints.targets import has_native_target, load_adapted, load_target
from peagle.config import (
    AUTO_LIMITS,
    DEFAULT_SPECULATIVE_TOKENS,
    EngineConfig,
    SpeculativeConfig,
)
from peagle.engine.engine import Speculation
from peagle.engine.memory import reported_shortage
from peagle.errors import ConfigError, HeadError
from peagle.models.binding import bind_kernels
from peagle.models.drafter import Drafter
from peagle.models.eagle import EagleNetwork
from peagle.models.eagle3 import Eagle3Drafter
from peagle.models.fp8 import check_gpu, quantize_linears
from peagle.models.ngram import NgramDrafter
from peagle.models.p_eagle import PEagleDrafter
from peagle.models.target import TargetModel
from peagle.speculation.trees import BEAM, num_candidates

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def choose_device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        raise ConfigError(f"device={config.device!r} is unknown", hint="use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch sees no GPU", hint="use cpu")
    return device


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype={config.dtype!r} is unknown", hint=f"use {', '.join(DTYPES)}")
    return DTYPES[config.dtype]


def load_engine_target(folder: Path, config: EngineConfig) -> TargetModel:
    """The target as the config asks for it, in a dtype and on a device of its choice."""
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    if config.quantization is not None:
        check_gpu(device)
    with reported_shortage(f"{folder} in {str(dtype).removeprefix('torch.')}", device):
        load = load_target if has_native_target(folder) else load_adapted
        target = load(folder, dtype=dtype, device=device)
        if config.quantization is not None:
            quantize_linears(target)
    bind_kernels(target, batch_invariant=config.batch_invariant)
    return target


def load_speculation(config: SpeculativeConfig, target: TargetModel) -> Speculation | None:
    """The drafter that the config asks for, bound to the target; None for method none."""
    if config.method == "none" or (config.method is None and config.model is None):
        return None
    if config.model is None:
        drafter: Drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        advice = DEFAULT_SPECULATIVE_TOKENS
    else:
        weight = target.embed_tokens.weight
        if not target.has_hidden_states:
            raise ConfigError(
                "this target's layers hand on more than one hidden state, so no head can read them",
                hint="draft without a head, by the method ngram",
            )
        with reported_shortage(f"the head {config.model}", weight.device):
            network = load_head(config.model, target, dtype=weight.dtype, device=weight.device)
        bind_kernels(network)
        drafter = head_drafter(network, config)
        advice = network.config.num_speculative_tokens
    invariant = target.policy.batch_invariant
    if config.num_draft_nodes is not None and invariant:
        raise ConfigError(
            "batch_invariant cannot be combined with trees: a row's sums depend on its place",
            hint="drop num_draft_nodes, or batch_invariant",
        )
    if config.num_draft_nodes is not None and not target.rolls_back:
        raise ConfigError(
            "this target computes each prefix again, which trees have many of",
            hint="drop num_draft_nodes: drafts are then a chain",
        )
    has_trees = target.rolls_back and not invariant
    if _is_auto(config, drafter, has_trees=has_trees):
        on_gpu = target.embed_tokens.weight.is_cuda
        return _auto(config, drafter, advice, "cuda" if on_gpu else "cpu", has_trees=has_trees)
    depth = config.num_speculative_tokens or advice
    return Speculation(drafter, depth, config.verification, config.num_draft_nodes)


def _is_auto(config: SpeculativeConfig, drafter: Drafter, *, has_trees: bool) -> bool:
    """Asked for, or nothing else was and trees are possible."""
    if config.speculation is not None:
        return config.speculation == "auto"
    is_given = (config.num_speculative_tokens or config.num_draft_nodes) is not None
    can_draft_trees = hasattr(drafter, "lattice") and config.verification == "coupled"
    return can_draft_trees and not is_given and has_trees


def _auto(
    config: SpeculativeConfig, drafter: Drafter, advice: int, device: str, *, has_trees: bool
) -> Speculation:
    """What is given is the limit. P-EAGLE drafts trees, others chains."""
    depth, nodes = config.num_speculative_tokens, config.num_draft_nodes
    if hasattr(drafter, "lattice") and has_trees:
        most_depth, most_nodes = AUTO_LIMITS[device]
        depth = depth or min(most_depth, drafter.max_speculative_tokens)
        nodes = nodes or min(most_nodes, num_candidates(depth, BEAM))
    return Speculation(drafter, depth or advice, config.verification, nodes, is_auto=True)


def head_drafter(network: EagleNetwork, config: SpeculativeConfig) -> Drafter:
    method = network.config.method
    if config.method not in (None, method):
        raise HeadError(
            f"{config.model} is a head for {method}, not for {config.method}",
            hint=f"drop the method, or use {method}",
        )
    return PEagleDrafter(network) if method == "p-eagle" else Eagle3Drafter(network)
