"""How much memory a training row takes, to choose the number of segments before running out.

The estimate counts what backward keeps of each layer and the loss chunk, in the compute dtype,
with a margin; it was made for choosing S, not for filling a card to the last megabyte.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from peagle.errors import ConfigError
from peagle.models.eagle import EagleNetwork
from peagle.models.head_config import HeadConfig

MARGIN = 1.25  # fp32 norms, attention's workspaces, the allocator's gaps
LOGIT_COPIES = 5  # draft and target logits, their gradient, and what a softmax in fp32 adds


def row_bytes(config: HeadConfig, itemsize: int, *, activation_checkpointing: bool) -> int:
    """What one row keeps until its backward pass."""
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    attended = config.num_attention_heads * config.head_dim
    size, inner = config.hidden_size, config.intermediate_size
    layer = 2 * size + heads + 2 * attended + 4 * size + 3 * inner
    kept = config.num_hidden_layers * (size if activation_checkpointing else layer)
    working = 2 * layer  # the layer in backward, with its gradients
    return int((kept + working + 8 * size) * itemsize * MARGIN)


def fixed_bytes(network: EagleNetwork, num_tokens: int, chunk_rows: int, itemsize: int) -> int:
    """Weights with gradients and moments, the target's states of a packed row, one loss chunk."""
    config = network.config
    weights = sum(p.numel() for p in network.parameters())
    features = num_tokens * (network.fc.in_features + config.target_hidden_size) * itemsize
    logits = LOGIT_COPIES * chunk_rows * config.draft_vocab_size * 4
    return weights * (4 * 4 + itemsize) + features + logits


def max_rows(
    network: EagleNetwork,
    num_tokens: int,
    chunk_rows: int,
    budget: int,
    *,
    itemsize: int,
    activation_checkpointing: bool,
) -> int:
    """Rows of one segment that fit into `budget` bytes."""
    left = budget - fixed_bytes(network, num_tokens, chunk_rows, itemsize)
    per_row = row_bytes(network.config, itemsize, activation_checkpointing=activation_checkpointing)
    if left < num_tokens * per_row:
        raise ConfigError(
            f"{budget / 2**30:.1f} GiB do not hold the context rows of {num_tokens} tokens",
            hint="lower data.tokens_per_row or loss.chunk_rows, "
            "or set run.activation_checkpointing=true",
        )
    return left // per_row


def free_memory(device: torch.device) -> int:
    if device.type != "cuda":
        raise ConfigError(
            "partitions: auto needs a budget on CPU", hint="set run.memory_gib, or a number"
        )
    return torch.cuda.mem_get_info(device)[0]


def checkpoint_activations(layers: nn.ModuleList, *, compiled: bool) -> None:
    """Keeps only each layer's input and computes the rest again in backward."""
    for layer in layers:
        forward = torch.compile(layer.forward, dynamic=False) if compiled else layer.forward
        layer.forward = functools.partial(checkpoint, forward, use_reentrant=False)
