"""The memory that one GPU of a run will need, by what it is for: nothing is loaded or run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from peagle.models.config import DecoderConfig
from peagle.models.eagle import EagleNetwork, shared_tables
from peagle.models.head_config import HeadConfig
from peagle.models.target import TargetModel
from peagle.train.inputs import Inputs, reads_layers
from peagle.train.memory import feature_bytes, loss_bytes, row_bytes, state_bytes
from peagle.train.planning import build_planner, draw_rows, measure_shapes, rows_that_fit
from peagle.train.recipe import Recipe

DeviceType = Literal["cuda", "cpu"]
GATHERED_LAYERS = 2  # that FSDP2 holds whole: the one that runs and the next


class Pass(NamedTuple):
    """Rows of the largest forward pass, and how many passes a step has."""

    rows: int
    per_step: int


@dataclass(frozen=True)
class Footprint:
    parts: dict[str, int]  # bytes
    rows_per_pass: int
    passes_per_step: int
    num_gpus: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def footprint(inputs: Inputs, num_gpus: int = 1, device: DeviceType = "cuda") -> Footprint:
    """For a run on `num_gpus`, wherever this is computed; the largest moment of a step."""
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
    planner = build_planner(recipe, inputs.head.max_speculative_tokens)
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


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.itemsize for p in module.parameters())
