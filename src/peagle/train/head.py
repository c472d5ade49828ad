"""The head that a run trains: its sizes, and the weights that it starts with."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoints.heads.loading import load_head
from peagle.data.dataset import Dataset
from peagle.errors import ConfigError
from peagle.models.config import DecoderConfig
from peagle.models.correction import Correction, initialise_correction
from peagle.models.eagle import EagleNetwork, initialise, shared_tables
from peagle.models.head_config import HeadConfig
from peagle.models.target import TargetModel, default_aux_hidden_state_layers
from peagle.train.recipe import Recipe


def head_config(recipe: Recipe, target: DecoderConfig, rope: dict[str, Any]) -> HeadConfig:
    head = recipe.head
    layers = head.aux_hidden_state_layer_ids or default_aux_hidden_state_layers(
        target.num_hidden_layers
    )
    if head.copy_target_layers:
        _check_copy(recipe, target)
    return HeadConfig(
        method=head.method,
        target_model=recipe.target.model,
        target_hidden_size=target.hidden_size,
        target_num_hidden_layers=target.num_hidden_layers,
        vocab_size=target.vocab_size,
        aux_hidden_state_layer_ids=layers,
        hidden_size=target.hidden_size,
        intermediate_size=head.intermediate_size or target.intermediate_size,
        num_hidden_layers=head.num_hidden_layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=rope,
        draft_vocab_size=head.draft_vocab_size or target.vocab_size,
        max_speculative_tokens=head.max_speculative_tokens,
        num_speculative_tokens=head.num_speculative_tokens,
        has_embed_tokens=head.train_embed_tokens,
        has_lm_head=head.train_lm_head,
        norm_before_residual=head.norm_before_residual,
        norm_output=head.norm_output,
        mask_token_id=head.mask_token_id,
        correction_size=head.correction_size,
        sliding_window=head.sliding_window,
    )


def _check_copy(recipe: Recipe, target: DecoderConfig) -> None:
    head = recipe.head
    if head.num_hidden_layers > target.num_hidden_layers:
        raise ConfigError(
            f"head.copy_target_layers cannot fill {head.num_hidden_layers} layers: "
            f"the target has {target.num_hidden_layers}",
            hint="lower head.num_hidden_layers",
        )
    if head.intermediate_size not in (None, target.intermediate_size):
        raise ConfigError(
            f"head.copy_target_layers needs the target's intermediate_size, "
            f"{target.intermediate_size}, not {head.intermediate_size}",
            hint="leave head.intermediate_size out",
        )


def build_network(
    recipe: Recipe, config: HeadConfig, target: TargetModel, dataset: Dataset, train: list[int]
) -> EagleNetwork:
    """fp32 master weights: autocast makes the rest."""
    table = target.embed_tokens.weight
    dtype = torch.float32 if table.dtype == torch.bfloat16 else table.dtype
    if recipe.head.start_from is not None:
        network = load_head(recipe.head.start_from, target, dtype=dtype, device=table.device)
        network.config = continued(recipe.head.start_from, network.config, config)
        if config.correction_size is not None:
            return with_correction(network, recipe.run.seed)
        network.correction = None  # it was made for the head as it was
        return network.train().requires_grad_(True)
    network = EagleNetwork(config, shared_tables(target))
    if config.reduced_vocabulary:
        network.target_ids = frequent_tokens(dataset, train, config)
    network.to(table.device, dtype)
    generator = torch.Generator(table.device).manual_seed(recipe.run.seed)
    initialise(network, target, generator, from_target=recipe.head.copy_target_layers)
    return network


def with_correction(network: EagleNetwork, seed: int) -> EagleNetwork:
    """The head with a correction that learns alone. One that it has goes on from where it is."""
    config, weight = network.config, network.fc.weight
    assert config.correction_size is not None
    network.requires_grad_(False)
    had = None if network.correction is None else network.correction.down_proj.in_features
    if had not in (None, config.correction_size):
        raise ConfigError(
            f"the head has a correction of size {had}, not {config.correction_size}",
            hint=f"set head.correction_size={had}, or start from the head without it",
        )
    if network.correction is None:
        correction = Correction(config.hidden_size, config.correction_size, config.rms_norm_eps)
        network.correction = correction.to(weight.device, weight.dtype)
        initialise_correction(correction, torch.Generator(weight.device).manual_seed(seed))
    network.correction.requires_grad_(True)
    return network.train()


# What a run may change of the head that it starts from, and what no recipe can ask for.
CHANGED = (
    "target_model",
    "target_num_hidden_layers",
    "max_speculative_tokens",
    "num_speculative_tokens",
    "mask_token_id",
    "correction_size",
)
KEPT = ("norm_before_fc", "fc_norm", "attention_bias", "mlp_bias")


def continued(name: str, old: HeadConfig, new: HeadConfig) -> HeadConfig:
    """The config of a run that starts from another head's weights: their sizes must agree."""
    fields = [f.name for f in dataclasses.fields(new) if f.name not in CHANGED + KEPT]
    differing = [f for f in fields if getattr(old, f) != getattr(new, f)]
    if differing:
        listed = ", ".join(f"{f} {getattr(old, f)}, not {getattr(new, f)}" for f in differing)
        raise ConfigError(
            f"head.start_from={name} has other sizes than this recipe: {listed}",
            hint="repeat its sizes in the head section",
        )
    return dataclasses.replace(new, **{f: getattr(old, f) for f in KEPT})


def frequent_tokens(dataset: Dataset, train: list[int], config: HeadConfig) -> Tensor:
    """[Vd]: the most frequent supervised tokens, in rising order, as d2t wants them."""
    counts = torch.zeros(config.vocab_size, dtype=torch.long)
    for index in train:
        row = dataset[index]
        tokens = torch.as_tensor(row.token_ids)[torch.as_tensor(row.loss_mask).bool()]
        counts += torch.bincount(tokens.long(), minlength=config.vocab_size)
    return counts.argsort(descending=True, stable=True)[: config.draft_vocab_size].sort().values
