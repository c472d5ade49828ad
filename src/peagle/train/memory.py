"""How much memory training takes, by what it is for, counted from shapes: nothing is loaded or run.

Counted is what autograd keeps for backward, tensor by tensor, what the layer in backward works
with, and what is there all the time. The counts are bounds from above: tests hold them against
the bytes that a step on CPU really allocates.

R rows of one pass, n tokens of a packed row, H hidden size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from peagle.errors import ConfigError
from peagle.models.config import DecoderConfig
from peagle.models.eagle import EagleNetwork, shared_tables
from peagle.models.head_config import HeadConfig
from peagle.models.target import TargetModel
from peagle.train.batches import SEGMENT_MULTIPLE, draw_rows, measure_shapes
from peagle.train.inputs import Inputs, reads_layers
from peagle.train.planner import build_planner
from peagle.train.recipe import Recipe

PRECISE = 4  # bytes of float32: what norms and softmaxes compute in
INDICES = 80  # bytes a row: anchor, depth, document, position, and its place in the loss
DeviceType = Literal["cuda", "cpu"]
GATHERED_LAYERS = 2  # that FSDP2 holds whole: the one that runs and the next


@dataclass(frozen=True)
class Footprint:
    parts: dict[str, int]  # bytes
    rows_per_pass: int
    passes_per_step: int
    num_gpus: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Pass(NamedTuple):
    """Rows of the largest forward pass, and how many passes a step has."""

    rows: int
    per_step: int


def footprint(inputs: Inputs, num_gpus: int = 1, device: DeviceType = "cuda") -> Footprint:
    """What a run on `num_gpus` takes at the largest moment of a step, wherever this is computed."""
    recipe, config = inputs.recipe, inputs.head
    itemsize = 2 if device == "cuda" else 4
    compiled = device == "cuda" and recipe.run.compile
    target, network = meta_models(inputs)
    loaded = target_bytes(target, itemsize, tables_alone=not reads_layers(recipe))
    largest = largest_pass(inputs, network, loaded, device)
    parts = {"target's weights": loaded}
    parts |= shared_out(state_bytes(network, itemsize), network, recipe, num_gpus, largest.per_step)
    parts |= moment(recipe, config, inputs.sizes, largest.rows, itemsize, compiled=compiled)
    if device == "cpu":  # FlexAttention needs none of these
        parts["dense attention masks"] = dense_mask_bytes(config, largest.rows, recipe)
    return Footprint(parts, largest.rows, largest.per_step, num_gpus)


def meta_models(inputs: Inputs) -> tuple[TargetModel, EagleNetwork]:
    """Shapes without storage."""
    with torch.device("meta"):
        target = TargetModel(inputs.sizes)
        return target, EagleNetwork(inputs.head, shared_tables(target))


def target_bytes(target: TargetModel, itemsize: int, *, tables_alone: bool) -> int:
    weights = sum(p.numel() for p in target.parameters())
    layers = sum(p.numel() for p in target.layers.parameters()) if tables_alone else 0
    return (weights - layers) * itemsize


def largest_pass(inputs: Inputs, network: EagleNetwork, loaded: int, device: DeviceType) -> Pass:
    """Drawn from the data, as the run will draw; padded as on that device."""
    recipe = inputs.recipe
    planner = build_planner(recipe, inputs.head)
    if recipe.run.partitions == "auto" and recipe.run.memory_gib is not None:
        budget, itemsize = int(recipe.run.memory_gib * 2**30), 2 if device == "cuda" else 4
        compiled = device == "cuda" and recipe.run.compile
        planner.max_rows = rows_that_fit(
            inputs, network, loaded, budget, itemsize, compiled=compiled
        )
    drawn = draw_rows(inputs, planner)
    if device == "cuda":
        planner.shapes = measure_shapes(drawn, planner, recipe)
        drawn = draw_rows(inputs, planner)
    rows = max(len(s.positions) for planned in drawn for s in planned.segments)
    return Pass(rows, max(len(p.segments) for p in drawn) * recipe.data.rows_per_step)


def shared_out(
    parts: dict[str, int], network: EagleNetwork, recipe: Recipe, num_gpus: int, passes: int
) -> dict[str, int]:
    """What one of several GPUs holds of weights, gradients and moments."""
    weights, gradients = parts["drafter's weights"], parts["gradients"]
    if num_gpus == 1:
        return parts
    if recipe.run.sharding == "ddp":
        return parts | {"gradients": 2 * gradients}  # the buckets in which they are exchanged
    layers = [_bytes(layer) for layer in network.layers]
    # The root stays whole between forward and backward; layers come and go.
    whole = _bytes(network) - sum(layers) + GATHERED_LAYERS * max(layers)
    # Before the last pass of a step gradients are not exchanged, and so not shared out.
    own = gradients if passes > 1 else gradients // num_gpus + GATHERED_LAYERS * max(layers)
    moments = parts["AdamW's moments"] // num_gpus
    shares = {"drafter's weights": weights // num_gpus + whole, "gradients": own}
    return parts | shares | {"AdamW's moments": moments}


def moment(
    recipe: Recipe,
    config: HeadConfig,
    target: DecoderConfig,
    rows: int,
    itemsize: int,
    *,
    compiled: bool,
) -> dict[str, int]:
    """The larger of a step's two moments: the target's pass, or the drafter's backward."""
    num_tokens = recipe.data.tokens_per_row
    per_row = row_bytes(
        config,
        itemsize,
        activation_checkpointing=recipe.run.activation_checkpointing,
        compiled=compiled and config.method == "p-eagle",
    )
    kept = ", checkpointed" if recipe.run.activation_checkpointing else ""
    drafter = {
        f"features of {num_tokens} tokens": feature_bytes(config, num_tokens, itemsize),
        f"activations of {rows} rows{kept}": rows * per_row,
        f"loss of {recipe.loss.chunk_rows} rows": loss_bytes(
            config, recipe.loss.chunk_rows, itemsize, compiled=compiled
        ),
    }
    if recipe.data.features is not None:
        return drafter
    aux_hidden_states = len(config.aux_hidden_state_layer_ids)
    width = (2 * aux_hidden_states + 4) * target.hidden_size + 4 * target.intermediate_size
    running = {f"target's pass over {num_tokens} tokens": num_tokens * width * itemsize}
    return max(drafter, running, key=lambda parts: sum(parts.values()))


def dense_mask_bytes(config: HeadConfig, rows: int, recipe: Recipe) -> int:
    """The mask and the distances, and the float mask that each layer keeps."""
    kept = 1 if recipe.run.activation_checkpointing else config.num_hidden_layers
    return rows * rows * (1 + 8 + 4 * kept)


def rows_that_fit(
    inputs: Inputs, network: EagleNetwork, taken: int, budget: int, itemsize: int, *, compiled: bool
) -> int:
    """How many rows a segment has with `partitions: auto`. `taken` bytes are the target's."""
    recipe, config = inputs.recipe, network.config
    fixed = taken + fixed_bytes(
        network, recipe.data.tokens_per_row, recipe.loss.chunk_rows, itemsize, compiled=compiled
    )
    per_row = row_bytes(
        config,
        itemsize,
        activation_checkpointing=recipe.run.activation_checkpointing,
        compiled=compiled,
    )
    context = inputs.longest if config.reach is None else min(inputs.longest, config.reach + 2)
    rows = max_rows(budget, fixed, per_row, context + config.max_speculative_tokens)
    return rows - rows % SEGMENT_MULTIPLE or rows


def max_rows(budget: int, fixed: int, per_row: int, least: int) -> int:
    """Rows of one segment that fit into `budget` bytes; `least` are those of one rollout."""
    rows = (budget - fixed) // per_row
    if rows < least:
        raise ConfigError(
            f"{budget / 2**30:.1f} GiB cannot hold the {least} rows that a segment needs at least: "
            f"{fixed / 2**30:.1f} are taken and {least * per_row / 2**30:.1f} needed",
            hint="lower data.tokens_per_row or loss.chunk_rows, "
            "or set run.activation_checkpointing=true",
        )
    return rows


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


def usable_memory(device: torch.device) -> int:
    """What this process may have of a GPU: what it holds and what is free."""
    if device.type != "cuda":
        raise ConfigError(
            "partitions: auto needs a budget on CPU", hint="set run.memory_gib, or a number"
        )
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


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
    loss_rows = size * (2 * precise + 4 * itemsize)  # the final norm, and the loss's gradient
    return inputs + layers * layer + first + loss_rows + working


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


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.itemsize for p in module.parameters())
