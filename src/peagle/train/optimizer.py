"""AdamW over fp32 master weights, and the learning rate as a share of the run."""

from __future__ import annotations

import math

import torch
from torch import nn

from peagle.train.recipe import OptimizerSection, ScheduleSection


def build_optimizer(module: nn.Module, options: OptimizerSection) -> torch.optim.AdamW:
    """Matrices decay; norms and the mask vectors do not."""
    weights = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        fused=all(p.is_cuda for p in weights),
    )


def learning_rate_share(options: ScheduleSection, progress: float) -> float:
    """Share of the peak learning rate at `progress` 0..1 of the run."""
    if progress < options.warmup:
        return progress / options.warmup
    if options.kind == "constant":
        return 1.0
    left = (1.0 - progress) / max(1.0 - options.warmup, 1e-9)
    left = min(max(left, 0.0), 1.0)
    if options.kind == "cosine":
        left = 0.5 * (1.0 - math.cos(math.pi * left))
    return options.final + (1.0 - options.final) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
