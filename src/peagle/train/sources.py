"""Where a run takes the target's hidden states from, as its recipe says."""

from __future__ import annotations

from pathlib import Path

from peagle.data.dataset import Dataset
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from peagle.train.capture import StoredFeatures
from peagle.train.distributed import world_size
from peagle.train.features import FeatureSource, OnlineFeatures
from peagle.train.recipe import Recipe
from peagle.train.vllm_source import Need, open_features


def feature_source(
    recipe: Recipe, target: TargetModel, network: EagleNetwork, dataset: Dataset
) -> FeatureSource:
    aux_hidden_states = network.config.aux_hidden_state_layer_ids
    if recipe.data.features is None:
        return OnlineFeatures(target, aux_hidden_states)
    table = target.embed_tokens.weight
    if recipe.data.features == "vllm":
        need = Need(
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
