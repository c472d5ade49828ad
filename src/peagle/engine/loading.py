"""References and options -> the objects an engine is made of."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.loading import load_head
from peagle.checkpoints.heads.references import resolve_head
from peagle.checkpoints.targets import has_native_target, load_adapted, load_target
from peagle.config import (
    AUTO_LIMITS,
    DEFAULT_SPECULATIVE_TOKENS,
    MAX_SPECULATIVE_TOKENS,
    EngineConfig,
    SpeculativeConfig,
)
from peagle.engine.engine import Speculation, check_drafts
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
from peagle.speculation.trees import BEAM, max_tree_depth, num_candidates

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
        advice = trained = DEFAULT_SPECULATIVE_TOKENS
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
        trained = network.config.max_speculative_tokens
    if config.num_draft_nodes is not None and not target.rolls_back:
        raise ConfigError(
            "this target computes each prefix again, which trees have many of",
            hint="drop num_draft_nodes: drafts are then a chain",
        )
    drafts = _choose_drafts(
        config,
        _Limits(
            drafter.method, drafter.max_speculative_tokens, drafter.max_tree_depth, advice, trained
        ),
        target.embed_tokens.weight.device,
        may_be_trees=target.rolls_back and not target.policy.batch_invariant,
    )
    return Speculation(drafter, drafts.depth, config.verification, drafts.nodes, drafts.is_auto)


def check_speculation(config: SpeculativeConfig, engine: EngineConfig) -> None:
    """Says what is wrong with the drafts that are asked for before a target is loaded."""
    if config.method == "none" or (config.method is None and config.model is None):
        return
    if config.num_draft_nodes is not None and engine.batch_invariant:
        raise ConfigError(
            "batch_invariant cannot be combined with trees: a row's sums depend on its place",
            hint="drop num_draft_nodes, or batch_invariant",
        )
    limits = _limits_of(config)
    may_be_trees = not engine.batch_invariant
    drafts = _choose_drafts(config, limits, choose_device(engine), may_be_trees=may_be_trees)
    check_drafts(limits, drafts.depth, drafts.nodes, config.verification)


class _Limits(NamedTuple):
    """engine.DraftLimits, how many drafts are advised, and how many the head has learned."""

    method: str
    max_speculative_tokens: int
    max_tree_depth: int
    advice: int
    trained: int


class _Drafts(NamedTuple):
    depth: int
    nodes: int | None  # None: chains
    is_auto: bool


def _limits_of(config: SpeculativeConfig) -> _Limits:
    """Of the drafter that the config asks for."""
    method, deepest = "ngram", MAX_SPECULATIVE_TOKENS
    advice = trained = DEFAULT_SPECULATIVE_TOKENS
    if config.model is not None:
        head = read_head_config(resolve_head(config.model))
        method, advice = head.method, head.num_speculative_tokens
        trained = head.max_speculative_tokens
        deepest = trained if method == "p-eagle" else MAX_SPECULATIVE_TOKENS
    return _Limits(method, deepest, max_tree_depth(method, deepest), advice, trained)


def _choose_drafts(
    config: SpeculativeConfig, limits: _Limits, device: torch.device, *, may_be_trees: bool
) -> _Drafts:
    """What is given holds; for auto it is the limit. Without either, P-EAGLE drafts trees, for
    they cost it no more than chains: auto cannot tell what the passes of a beam cost."""
    depth, nodes = config.num_speculative_tokens, config.num_draft_nodes
    is_free = limits.method == "p-eagle" and config.verification == "coupled" and may_be_trees
    is_auto = config.speculation == "auto"
    if config.speculation is None:
        is_auto = is_free and depth is None and nodes is None
    if is_auto:
        most_depth, most_nodes = AUTO_LIMITS["cuda" if device.type == "cuda" else "cpu"]
        if is_free or nodes is not None:
            depth = depth or min(most_depth, limits.max_tree_depth)
            nodes = nodes or min(most_nodes, num_candidates(depth, BEAM))
        depth = depth or min(most_depth, limits.trained)
    if depth is None and nodes is not None:
        depth = min(limits.advice, limits.max_tree_depth)
    return _Drafts(depth or limits.advice, nodes, is_auto)


def head_drafter(network: EagleNetwork, config: SpeculativeConfig) -> Drafter:
    method = network.config.method
    if config.method not in (None, method):
        raise HeadError(
            f"{config.model} is a head for {method}, not for {config.method}",
            hint=f"drop the method, or use {method}",
        )
    return PEagleDrafter(network) if method == "p-eagle" else Eagle3Drafter(network)
