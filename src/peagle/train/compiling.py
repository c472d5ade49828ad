"""What is done to layers before they train: compilation, and activation checkpointing."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel


def compile_layers(target: TargetModel, network: EagleNetwork) -> None:
    """Layer by layer: all layers of a kind share one compilation."""
    for layer in target.layers:
        layer.compile(dynamic=False)
    if network.config.method == "p-eagle":
        for layer in network.layers:
            layer.compile(dynamic=False)


def checkpoint_activations(layers: nn.ModuleList, *, compiled: bool) -> None:
    """Keeps only each layer's input and computes the rest again in backward."""
    for layer in layers:
        forward = torch.compile(layer.forward, dynamic=False) if compiled else layer.forward
        layer.forward = functools.partial(checkpoint, forward, use_reentrant=False)
