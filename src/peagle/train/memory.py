"""How much memory training takes, counted from shapes before anything runs.

Counted is what autograd keeps for backward, tensor by tensor, what the layer in backward works
with, and what is there all the time. The counts are bounds from above: tests hold them against
the bytes that a step on CPU really allocates.

R rows of one pass, n tokens of a packed row, H hidden size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

import torch

from peagle.errors import ConfigError
from peagle.models.eagle import EagleNetwork
from peagle.models.head_config import HeadConfig

PRECISE = 4  # bytes of float32: what norms and softmaxes compute in
INDICES = 80  # bytes a row: anchor, depth, document, position, and what it is charged for


def row_bytes(
    config: HeadConfig, itemsize: int, *, activation_checkpointing: bool, compiled: bool = False
) -> int:
    """What one row needs at the most: all that its layers kept, and gradients in backward.

    `itemsize` is that of activations: 2 under bf16 autocast. Compiled layers keep less.
    """
    size, layers = config.hidden_size, config.num_hidden_layers
    precise = max(PRECISE, itemsize)
    working = working_bytes(config, itemsize)
    layer = layer_bytes(config, itemsize, compiled=compiled)
    if config.method == "eagle3":  # a row is one anchor at one step; one step is in backward
        working //= config.max_speculative_tokens
        layer += chain_bytes(config, itemsize)
    inputs = size * (precise + 2 * itemsize) + 2 * config.head_dim * itemsize + INDICES
    first = size * (2 * precise + itemsize)  # layer 0 has a third norm, for fp32 embeddings
    if activation_checkpointing:  # layers' inputs, and one layer that is computed again
        return inputs + layers * size * itemsize + layer + first + working
    charged = size * (2 * precise + 4 * itemsize)  # the final norm, and the loss's gradient
    return inputs + layers * layer + first + charged + working


def layer_bytes(config: HeadConfig, itemsize: int, *, compiled: bool) -> int:
    """What one layer keeps of a row until its backward pass."""
    size, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    queries, keys = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = (queries + 2 * keys) + (queries + keys) + queries  # projected, rotated, output
    sums = PRECISE * heads  # the log of each softmax's denominator
    if compiled:  # pointwise work is done again in backward: norms, silu(gate) * up
        return (4 * size + attention + 3 * inner) * itemsize + sums
    # A norm keeps its input in float32, the normed rows, and its output, which a product reads.
    norms = 2 * size * (max(PRECISE, itemsize) + 2 * itemsize)
    # gate and up, silu(gate), and the product of both
    return norms + (attention + 4 * inner) * itemsize + sums


def chain_bytes(config: HeadConfig, itemsize: int) -> int:
    """EAGLE-3: the keys and values of earlier steps that a step of a chain stacks, on average."""
    queries = config.num_attention_heads * config.head_dim
    return (config.max_speculative_tokens - 1) * queries * itemsize + 4 * queries * itemsize


def working_bytes(config: HeadConfig, itemsize: int) -> int:
    """Gradients of a row inside the layer in backward: the MLP's, or the norms' in float32."""
    precise = max(PRECISE, itemsize)
    return max(4 * config.intermediate_size * itemsize, 4 * config.hidden_size * precise)


def loss_bytes(config: HeadConfig, chunk_rows: int, itemsize: int, *, compiled: bool) -> int:
    """One chunk: logits of draft and target and a gradient; uncompiled, softmaxes in float32."""
    per_logit = 3 * itemsize if compiled else 2 * itemsize + 5 * max(PRECISE, itemsize)
    return chunk_rows * config.draft_vocab_size * per_logit


def feature_bytes(config: HeadConfig, num_tokens: int, itemsize: int) -> int:
    """The target's aux_hidden_states and last states of a packed row, and its tokens."""
    width = (len(config.aux_hidden_state_layer_ids) + 1) * config.target_hidden_size
    return num_tokens * (width * itemsize + 8)


def state_bytes(network: EagleNetwork, itemsize: int) -> dict[str, int]:
    """What is there all the time, by what it is for, in one process that holds all of it."""
    config = network.config
    weights = list(network.parameters())
    whole = sum(p.numel() * p.itemsize for p in weights)
    matrices = sum(p.numel() for p in weights if p.dim() >= 2)
    cast = itemsize if itemsize < weights[0].itemsize else 0  # autocast's copies
    table = config.draft_vocab_size * config.hidden_size
    copies = 2 * table * itemsize if config.reduced_vocabulary else 0
    buffers = sum(b.numel() * b.itemsize for b in network.buffers())
    return {
        "drafter's weights": whole + buffers,
        "their copies in the compute dtype": matrices * cast,
        "gradients": whole + (2 * table * PRECISE if config.has_lm_head else 0),
        "AdamW's moments": 2 * whole,
        "tables of the draft vocabulary": copies,
    }


def fixed_bytes(
    network: EagleNetwork,
    num_tokens: int,
    chunk_rows: int,
    itemsize: int,
    *,
    compiled: bool = False,
) -> int:
    """All that does not grow with the rows of a pass, the target's weights left out."""
    config = network.config
    loss = loss_bytes(config, chunk_rows, itemsize, compiled=compiled)
    features = feature_bytes(config, num_tokens, itemsize)
    return sum(state_bytes(network, itemsize).values()) + features + loss


def max_rows(budget: int, fixed: int, per_row: int, least: int) -> int:
    """Rows of one segment that fit into `budget` bytes; `least` are the longest document's."""
    rows = (budget - fixed) // per_row
    if rows < least:
        raise ConfigError(
            f"{budget / 2**30:.1f} GiB do not hold the {least} rows of the longest document: "
            f"{fixed / 2**30:.1f} are taken and {least * per_row / 2**30:.1f} needed",
            hint="lower data.tokens_per_row or loss.chunk_rows, "
            "or set run.activation_checkpointing=true",
        )
    return rows


def usable_memory(device: torch.device) -> int:
    """What this process may have of a GPU: what it holds and what is free."""
    if device.type != "cuda":
        raise ConfigError(
            "partitions: auto needs a budget on CPU", hint="set run.memory_gib, or a number"
        )
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)
