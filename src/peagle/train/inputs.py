"""What a run reads before any weight is loaded: sizes of target and head, and the rows."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.checkpoints.references import load_config, resolve_model, same_target
from peagle.data.dataset import Dataset, check_tokens
from peagle.errors import ConfigError, DataError
from peagle.models.config import DecoderConfig, head_rope
from peagle.models.head_config import HeadConfig
from peagle.train.head import head_config
from peagle.train.recipe import Recipe

logger = logging.getLogger(__name__)
CHECKED_ROWS = 256  # whose tokens are compared with the target's vocabulary


@dataclass(frozen=True)
class Inputs:
    recipe: Recipe
    sizes: DecoderConfig  # the target's
    head: HeadConfig
    dataset: Dataset
    train: list[int]  # rows of the dataset
    held_out: list[int]

    @property
    def longest(self) -> int:
        """Tokens of the longest document that is trained on."""
        return int(self.dataset.lengths[self.train].max())


def read_inputs(recipe: Recipe) -> Inputs:
    """Reads them by the target's reference; no weight is loaded."""
    config = load_config(resolve_model(recipe.target.model))
    inputs = open_inputs(recipe, DecoderConfig.from_transformers(config), head_rope(config))
    _warn(inputs)
    return inputs


def _warn(inputs: Inputs) -> None:
    recipe, dataset = inputs.recipe, inputs.dataset
    target, answered_by = recipe.target.model, dataset.manifest["made_by"].get("target")
    if answered_by is not None and not same_target(str(answered_by), target):
        logger.warning(
            "the answers in %s are %s's, not %s's: a head should learn from its own target",
            *(dataset.folder, answered_by, target),
        )
    if not inputs.held_out:
        logger.warning(
            "none of the %d rows is held out at data.held_out_share=%s: the head is not evaluated, "
            "and the last one is kept",
            *(len(dataset), recipe.data.held_out_share),
        )


def open_inputs(recipe: Recipe, sizes: DecoderConfig, rope: dict[str, Any]) -> Inputs:
    """Cheap, and finds most of what a user can have wrong."""
    layers = recipe.head.aux_hidden_state_layer_ids or ()
    if not all(layer <= sizes.num_hidden_layers for layer in layers):
        raise ConfigError(
            f"head.aux_hidden_state_layer_ids={list(layers)} is out of range",
            hint=f"{recipe.target.model} has layers 0 to {sizes.num_hidden_layers}",
        )
    head = head_config(recipe, sizes, rope)
    head.check_fits(sizes)
    longest = min(recipe.data.tokens_per_row, sizes.max_position_embeddings)
    more = [Path(folder) for folder in recipe.data.more]
    dataset = Dataset(Path(recipe.data.path), longest, more=more)
    train, held_out = usable_rows(dataset, recipe)
    check_tokens(dataset, train[:: max(len(train) // CHECKED_ROWS, 1)], sizes.vocab_size)
    return Inputs(recipe, sizes, head, dataset, train, held_out)


def reads_layers(recipe: Recipe) -> bool:
    """Whether the target is needed whole; with features from elsewhere its tables suffice."""
    return recipe.data.features is None or recipe.head.copy_target_layers


def usable_rows(dataset: Dataset, recipe: Recipe) -> tuple[list[int], list[int]]:
    """-> rows to train on, and rows that are held out for evaluation."""
    train, held_out = dataset.split(recipe.data.held_out_share)
    if recipe.data.skip_looping:
        train = [i for i in train if not dataset.info[i]["looping"]]
    if recipe.data.max_tokens is not None:
        used = dataset.lengths[train].cumsum(0) <= recipe.data.max_tokens
        train = train[: int(used.sum())]
    if not train:
        raise DataError(
            f"{dataset.folder} has no rows left to train on",
            hint="look at data.held_out_share, data.skip_looping and data.max_tokens",
        )
    return train, held_out[: recipe.run.evaluate_rows]
