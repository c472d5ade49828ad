"""From a recipe to the parts of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoints.heads import load_head
from peagle.checkpoints.references import load_config, resolve_model
from peagle.checkpoints.targets import load_target
from peagle.data.dataset import Dataset
from peagle.errors import ConfigError, DataError
from peagle.models.eagle import EagleNetwork, initialise, shared_tables
from peagle.models.head_config import HeadConfig
from peagle.models.target import TargetModel, default_tap_layers
from peagle.train.batches import Batches
from peagle.train.capture import StoredFeatures
from peagle.train.cod import retentions
from peagle.train.distributed import rank, start_from_environment, world_size, wrap
from peagle.train.evaluate import Evaluator
from peagle.train.features import FeatureSource, OnlineFeatures
from peagle.train.losses import ChunkedLoss
from peagle.train.memory import checkpoint_activations, free_memory, max_rows
from peagle.train.objective import DraftModel, Eagle3Planner, PEaglePlanner, Planner
from peagle.train.optimizer import build_optimizer
from peagle.train.recipe import Recipe
from peagle.train.segments import Shapes
from peagle.train.trainer import Trainer, autocast

MEASURED_ROWS = 6  # packed rows whose drawn size sets the padded one


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
    folder = resolve_model(recipe.target.model)
    device = pick_device(recipe.run.device)
    start_from_environment(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_target(folder, dtype=dtype, device=device)
    rope = load_config(folder).rope_parameters
    return assemble(recipe, target, dict(rope))


def assemble(recipe: Recipe, target: TargetModel, rope: dict[str, Any]) -> Setup:
    """The same with a target at hand: numbered, because the order matters."""
    # 1. Models
    target.requires_grad_(False)
    device = target.embed_tokens.weight.device
    on_gpu = device.type == "cuda"
    longest = min(recipe.data.tokens_per_row, target.config.max_position_embeddings)
    dataset = Dataset(Path(recipe.data.path), longest)
    train, held_out = usable_rows(dataset, recipe)
    config = head_config(recipe, target, rope)
    config.check_fits(target.config)
    network = build_network(recipe, config, target, dataset, train)
    source = feature_source(recipe, target, network, dataset)

    # 2. What is drawn, and in which fixed shapes
    planner = build_planner(recipe, network)
    if recipe.run.partitions == "auto":
        planner.max_rows = rows_that_fit(recipe, network)
    batches = Batches(
        dataset,
        train,
        recipe.data.tokens_per_row,
        planner,
        recipe.run.seed,
        source,
        rank=rank(),
        world=world_size(),
    )
    if on_gpu:
        planner.shapes = measure_shapes(batches, planner, recipe)
        if recipe.run.compile:
            compile_layers(target, network)
    if recipe.run.activation_checkpointing:
        checkpoint_activations(network.layers, compiled=on_gpu and recipe.run.compile)

    # 3. The step
    dtype = torch.bfloat16 if on_gpu else None
    model = DraftModel(network)
    module = wrap(model, recipe.run.sharding)  # before the optimiser: it may replace weights
    trainer = Trainer(
        model,
        module,
        source,
        target.lm_head.weight,
        ChunkedLoss(
            recipe.loss.kind, recipe.loss.chunk_rows, compiled=on_gpu and recipe.run.compile
        ),
        build_optimizer(network, recipe.optimizer),
        max_grad_norm=recipe.optimizer.max_grad_norm,
        dtype=dtype,
    )

    # 4. What is held out
    evaluator = None
    if held_out:
        evaluator = build_evaluator(recipe, dataset, held_out, trainer, planner.shapes)
    return Setup(recipe, target, network, dataset, batches, trainer, evaluator)


def pick_device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def usable_rows(dataset: Dataset, recipe: Recipe) -> tuple[list[int], list[int]]:
    train, held_out = dataset.split(recipe.data.held_out_share)
    if recipe.data.skip_looping:
        train = [i for i in train if not dataset.info[i]["looping"]]
    if recipe.data.max_tokens is not None:
        used = dataset.lengths[train].cumsum(0) <= recipe.data.max_tokens
        train = train[: int(used.sum())]
    if not train:
        raise DataError(f"{dataset.folder} has no rows left to train on")
    return train, held_out[: recipe.run.evaluate_rows]


def head_config(recipe: Recipe, target: TargetModel, rope: dict[str, Any]) -> HeadConfig:
    head, sizes = recipe.head, target.config
    taps = head.aux_hidden_state_layer_ids or default_tap_layers(sizes.num_hidden_layers)
    return HeadConfig(
        method=head.method,
        target_model=recipe.target.model,
        target_hidden_size=sizes.hidden_size,
        target_num_hidden_layers=sizes.num_hidden_layers,
        vocab_size=sizes.vocab_size,
        aux_hidden_state_layer_ids=taps,
        hidden_size=sizes.hidden_size,
        intermediate_size=head.intermediate_size or sizes.intermediate_size,
        num_hidden_layers=head.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.max_position_embeddings,
        rms_norm_eps=sizes.rms_norm_eps,
        rope_parameters=rope,
        draft_vocab_size=head.draft_vocab_size or sizes.vocab_size,
        max_speculative_tokens=head.max_speculative_tokens,
        num_speculative_tokens=head.num_speculative_tokens,
        has_embed_tokens=head.train_embed_tokens,
        has_lm_head=head.train_lm_head,
        norm_before_residual=head.norm_before_residual,
        norm_output=head.norm_output,
        mask_token_id=head.mask_token_id,
    )


def build_network(
    recipe: Recipe, config: HeadConfig, target: TargetModel, dataset: Dataset, train: list[int]
) -> EagleNetwork:
    """fp32 master weights: autocast makes the rest."""
    table = target.embed_tokens.weight
    dtype = torch.float32 if table.dtype == torch.bfloat16 else table.dtype
    if recipe.head.start_from is not None:
        network = load_head(recipe.head.start_from, target, dtype=dtype, device=table.device)
        if network.config != config:
            raise ConfigError(
                f"head.start_from={recipe.head.start_from} has other sizes than this recipe",
                hint="repeat its sizes in the head section",
            )
        return network.train().requires_grad_(True)
    network = EagleNetwork(config, shared_tables(target))
    if config.reduced_vocabulary:
        network.target_ids = frequent_tokens(dataset, train, config)
    network.to(table.device, dtype)
    generator = torch.Generator(table.device).manual_seed(recipe.run.seed)
    initialise(network, target, generator, from_target=recipe.head.copy_target_layers)
    return network


def frequent_tokens(dataset: Dataset, train: list[int], config: HeadConfig) -> Tensor:
    """[Vd]: the most frequent supervised tokens, in rising order, as d2t wants them."""
    counts = torch.zeros(config.vocab_size, dtype=torch.long)
    for index in train:
        row = dataset[index]
        tokens = torch.as_tensor(row.token_ids)[torch.as_tensor(row.loss_mask).bool()]
        counts += torch.bincount(tokens.long(), minlength=config.vocab_size)
    return counts.argsort(descending=True, stable=True)[: config.draft_vocab_size].sort().values


def feature_source(
    recipe: Recipe, target: TargetModel, network: EagleNetwork, dataset: Dataset
) -> FeatureSource:
    taps = network.config.aux_hidden_state_layer_ids
    if recipe.data.features is None:
        return OnlineFeatures(target, taps)
    table = target.embed_tokens.weight
    return StoredFeatures(Path(recipe.data.features), recipe.target.model, taps, dataset, table)


def build_planner(recipe: Recipe, network: EagleNetwork) -> Planner:
    config = network.config
    depths = config.max_speculative_tokens
    draft_ids = None
    if config.reduced_vocabulary:
        draft_ids = torch.full((config.vocab_size,), -1)
        draft_ids[network.target_ids.cpu()] = torch.arange(config.draft_vocab_size)
    kind = PEaglePlanner if config.method == "p-eagle" else Eagle3Planner
    return kind(
        retentions(depths, recipe.cod.retention, recipe.cod.floor),
        recipe.loss.depth_decay ** torch.arange(depths),
        draft_ids=draft_ids,
        num_segments=recipe.run.partitions if isinstance(recipe.run.partitions, int) else 1,
    )


def measure_shapes(batches: Batches, planner: Planner, recipe: Recipe) -> Shapes:
    """Room for the mask rows of nearly every packed row, so that compiled code sees one shape."""
    if isinstance(planner, Eagle3Planner):
        return Shapes(charged_multiple=recipe.loss.chunk_rows)
    rows = batches.rows_from(0)
    drawn = [next(rows) for _ in range(MEASURED_ROWS)]
    most = max(sum(s.num_masks for s in p.segments) for p in drawn)
    capacity = recipe.data.tokens_per_row
    max_masks = -(-int(most * 1.02) // 1024) * 1024
    partitioned = planner.num_segments > 1 or planner.max_rows is not None
    whole = 2048 if partitioned else capacity + max_masks
    return Shapes(max_masks, row_multiple=whole, charged_multiple=recipe.loss.chunk_rows)


def rows_that_fit(recipe: Recipe, network: EagleNetwork) -> int:
    run, device = recipe.run, network.fc.weight.device
    budget = free_memory(device) if run.memory_gib is None else int(run.memory_gib * 2**30)
    return max_rows(
        network,
        recipe.data.tokens_per_row,
        recipe.loss.chunk_rows,
        budget,
        itemsize=2 if device.type == "cuda" else network.fc.weight.itemsize,
        activation_checkpointing=run.activation_checkpointing,
    )


def compile_layers(target: TargetModel, network: EagleNetwork) -> None:
    """Layer by layer: all layers of a kind share one compilation."""
    for layer in target.layers:
        layer.compile(dynamic=False)
    if network.config.method == "p-eagle":
        for layer in network.layers:
            layer.compile(dynamic=False)


def build_evaluator(
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
