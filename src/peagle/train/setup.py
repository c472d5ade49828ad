"""From a recipe to the parts of a run."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from peagle.checkpoints.references import resolve_model
from peagle.checkpoints.targets import load_layerless, load_target
from peagle.config import EngineConfig
from peagle.data.dataset import Dataset
from peagle.engine.loading import choose_device
from peagle.errors import ConfigError
from peagle.evaluate.evaluator import Evaluator
from peagle.models.eagle import EagleNetwork
from peagle.models.experts import LowBitMatrices
from peagle.models.target import TargetModel
from peagle.teacher_forcing.draft_model import DraftModel, autocast
from peagle.teacher_forcing.features import FeatureSource, OnlineFeatures
from peagle.teacher_forcing.partition import Shapes
from peagle.train.batches import Batches, draw_rows, measure_shapes
from peagle.train.distributed import rank, start_from_environment, world_size, wrap
from peagle.train.features.capture import StoredFeatures
from peagle.train.features.vllm_server import RequiredStates, open_features
from peagle.train.head import build_network
from peagle.train.inputs import Inputs, open_inputs, read_inputs, reads_layers
from peagle.train.losses import ChunkedLoss
from peagle.train.memory import rows_that_fit, usable_memory
from peagle.train.optimizer import build_optimizer
from peagle.train.planner import Planner, build_planner, draft_ids
from peagle.train.recipe import Recipe
from peagle.train.trainer import Trainer


@dataclass
class Setup:
    recipe: Recipe
    target: TargetModel
    network: EagleNetwork
    dataset: Dataset
    batches: Batches
    trainer: Trainer
    evaluator: Evaluator | None  # None: nothing is held out


def build(recipe: Recipe) -> Setup:
    """Loads the target by its reference and sets the run up."""
    device = pick_device(recipe.run.device)
    inputs = read_inputs(recipe)  # first: what is wrong shows before gigabytes are loaded
    start_from_environment(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    load = load_target if reads_layers(recipe) else load_layerless
    target = load(resolve_model(recipe.target.model), dtype=dtype, device=device)
    return put_together(inputs, target)


def assemble(recipe: Recipe, target: TargetModel, rope: dict[str, Any]) -> Setup:
    """Sets a run up with a target that is already loaded."""
    return put_together(open_inputs(recipe, target.config, rope), target)


def put_together(inputs: Inputs, target: TargetModel) -> Setup:
    """The parts in an order that matters."""
    # 1. Models
    recipe, dataset = inputs.recipe, inputs.dataset
    target.requires_grad_(False)
    on_gpu = target.embed_tokens.weight.is_cuda
    compiled = on_gpu and recipe.run.compile
    network = build_network(recipe, inputs.head, target, dataset, inputs.train)
    source = feature_source(recipe, target, network, dataset)

    # 2. What is drawn, and in which fixed shapes
    planner = build_planner(recipe, network.config, draft_ids(network))
    if recipe.run.partitions == "auto":
        planner.max_rows = affordable_rows(inputs, target, network, compiled=compiled)
    drawn = draw_rows(inputs, planner)
    if on_gpu:
        planner.shapes = measure_shapes(drawn, planner, recipe)
    if compiled:
        compile_layers(target, network)
    if recipe.run.activation_checkpointing:
        checkpoint_activations(network.layers, compiled=compiled)

    # 3. The step
    model = DraftModel(network)
    module = wrap(model, recipe.run.sharding)  # before the optimiser: it may replace weights
    trainer = Trainer(
        model,
        module,
        source,
        target.lm_head.weight,
        ChunkedLoss(
            recipe.loss.kind,
            recipe.loss.chunk_rows,
            compiled=compiled,
            weighting=recipe.loss.weighting,
            adjusted=target.adjusted if target.changes_logits else None,
        ),
        build_optimizer(network, recipe.optimizer),
        max_grad_norm=recipe.optimizer.max_grad_norm,
        dtype=torch.bfloat16 if on_gpu else None,
    )

    # 4. The rows, and those that are held out
    batches = build_batches(inputs, planner, source)
    evaluator = None
    if inputs.held_out:
        evaluator = held_out_evaluator(recipe, dataset, inputs.held_out, trainer, planner.shapes)
    return Setup(recipe, target, network, dataset, batches, trainer, evaluator)


def pick_device(name: str) -> torch.device:
    """Under torchrun each process takes the GPU of its local rank, unless one is named."""
    try:
        device = choose_device(EngineConfig(device=name))
    except ConfigError as error:
        raise ConfigError(f"run.{error.message}", hint=error.hint) from None
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def feature_source(
    recipe: Recipe, target: TargetModel, network: EagleNetwork, dataset: Dataset
) -> FeatureSource:
    aux_hidden_states = network.config.aux_hidden_state_layer_ids
    if recipe.data.features is None:
        return OnlineFeatures(target, aux_hidden_states)
    table = target.embed_tokens.weight
    if recipe.data.features == "vllm":
        need = RequiredStates(
            recipe.target.model,
            target.config,
            aux_hidden_states,
            int(dataset.lengths.max()),
            table.dtype,
        )
        log = Path(recipe.run.folder) / "vllm.log"
        return open_features(recipe.vllm, need, target, log, world_size=world_size())
    return StoredFeatures(
        Path(recipe.data.features), recipe.target.model, aux_hidden_states, dataset, table
    )


def compile_layers(target: TargetModel | None, network: EagleNetwork) -> None:
    """Layer by layer: all layers of a kind share one compilation."""
    for layer in target.layers if target is not None else ():
        layer.compile(dynamic=False)
    for matrices in target.modules() if target is not None else ():
        if isinstance(matrices, LowBitMatrices):  # their kernel is not the compiler's to trace
            call = torch.compiler.disable(matrices.grouped_linear)  # type: ignore[no-untyped-call]
            matrices.grouped_linear = call  # type: ignore[method-assign]
    if network.config.method == "p-eagle":
        for layer in network.layers:
            layer.compile(dynamic=False)
    if network.correction is not None:
        network.correction.compile(dynamic=False)


def checkpoint_activations(layers: nn.ModuleList, *, compiled: bool) -> None:
    """Keeps only each layer's input and computes the rest again in backward."""
    for layer in layers:
        forward = torch.compile(layer.forward, dynamic=False) if compiled else layer.forward
        layer.forward = functools.partial(checkpoint, forward, use_reentrant=False)


def affordable_rows(
    inputs: Inputs, target: TargetModel, network: EagleNetwork, *, compiled: bool
) -> int:
    weight, memory = target.lm_head.weight, inputs.recipe.run.memory_gib
    budget = usable_memory(weight.device) if memory is None else int(memory * 2**30)
    taken = sum(p.numel() * p.itemsize for p in target.parameters())
    itemsize = weight.itemsize
    return rows_that_fit(inputs, network, taken, budget, itemsize, compiled=compiled)


def build_batches(inputs: Inputs, planner: Planner, source: FeatureSource) -> Batches:
    recipe = inputs.recipe
    capacity, seed = recipe.data.tokens_per_row, recipe.run.seed
    processes = {"rank": rank(), "world": world_size()}
    return Batches(inputs.dataset, inputs.train, capacity, planner, seed, source, **processes)


def held_out_evaluator(
    recipe: Recipe, dataset: Dataset, held_out: list[int], trainer: Trainer, shapes: Shapes
) -> Evaluator:
    network = trainer.model.network
    depths = min(recipe.run.evaluate_tokens, network.config.max_speculative_tokens)
    capacity = recipe.data.tokens_per_row
    return Evaluator(
        dataset,
        held_out,
        trainer.source,
        depths,
        tokens_per_row=capacity,
        # One compiled shape where rows are padded to one; else memory alone matters.
        max_rows=shapes.row_multiple if shapes.row_multiple > capacity else capacity * 2,
        shapes=shapes._replace(max_masks=None),
        chunk_rows=recipe.loss.chunk_rows,
        autocast=autocast(trainer.device, trainer.table_dtype),
    )
