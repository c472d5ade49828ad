"""The planner of a run: what is drawn from a packed row, and in which fixed shapes."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from peagle.errors import ConfigError, DataError
from peagle.models.eagle import EagleNetwork
from peagle.train.batches import Batches
from peagle.train.cod import retentions
from peagle.train.inputs import Inputs
from peagle.train.memory import fixed_bytes, max_rows, row_bytes
from peagle.train.objective import Eagle3Planner, PEaglePlanner, PlannedRow, Planner
from peagle.train.recipe import Recipe
from peagle.train.segments import Shapes

MEASURED_ROWS = 6  # packed rows whose drawn size sets the padded one
SPARE = 1.02  # room for rows that draw more than those
MASK_MULTIPLE = 1024
SEGMENT_MULTIPLE = 2048  # rows of a part of a packed row: few sizes, few compilations


def build_planner(recipe: Recipe, depths: int, draft_ids: Tensor | None = None) -> Planner:
    check_method(recipe)
    kind = PEaglePlanner if recipe.head.method == "p-eagle" else Eagle3Planner
    return kind(
        retentions(depths, recipe.cod.retention, recipe.cod.floor),
        recipe.loss.depth_decay ** torch.arange(depths),
        draft_ids=draft_ids,
        num_segments=recipe.run.partitions if isinstance(recipe.run.partitions, int) else 1,
    )


def draft_ids(network: EagleNetwork) -> Tensor | None:
    """[V]: the draft id of each target id, -1 where there is none; None: all are the same."""
    config = network.config
    if not config.reduced_vocabulary:
        return None
    ids = torch.full((config.vocab_size,), -1)
    ids[network.target_ids.cpu()] = torch.arange(config.draft_vocab_size)
    return ids


def check_method(recipe: Recipe) -> None:
    """A chain of EAGLE-3 leaves keys behind as it runs: it is neither cut nor run again."""
    if recipe.head.method == "p-eagle":
        return
    options = {
        "run.partitions": recipe.run.partitions != 1,
        "run.activation_checkpointing": recipe.run.activation_checkpointing,
    }
    for name, used in options.items():
        if used:
            raise ConfigError(
                f"{name} works with p-eagle heads alone",
                hint="for less memory lower data.tokens_per_row or head.max_speculative_tokens",
            )


def draw_rows(inputs: Inputs, planner: Planner) -> list[PlannedRow]:
    """The first packed rows of a run, without features."""
    recipe = inputs.recipe
    capacity, seed = recipe.data.tokens_per_row, recipe.run.seed
    batches = Batches(inputs.dataset, inputs.train, capacity, planner, seed, source=None)
    drawn = list(islice(batches.rows_from(0), MEASURED_ROWS))
    if not any(row.weight for row in drawn):
        raise DataError(
            f"the first rows of {inputs.dataset.folder} have no token to learn from",
            hint="is data.tokens_per_row shorter than the prompts, or the loss mask 0?",
        )
    return drawn


def measure_shapes(drawn: list[PlannedRow], planner: Planner, recipe: Recipe) -> Shapes:
    """Room for the mask rows of nearly every packed row, so that compiled code sees one shape."""
    if isinstance(planner, Eagle3Planner):
        return Shapes(charged_multiple=recipe.loss.chunk_rows)
    most = max(sum(s.num_masks for s in p.segments) for p in drawn)
    max_masks = -(-int(most * SPARE) // MASK_MULTIPLE) * MASK_MULTIPLE
    partitioned = planner.num_segments > 1 or planner.max_rows is not None
    whole = SEGMENT_MULTIPLE if partitioned else recipe.data.tokens_per_row + max_masks
    return Shapes(max_masks, row_multiple=whole, charged_multiple=recipe.loss.chunk_rows)


def rows_that_fit(
    inputs: Inputs, network: EagleNetwork, taken: int, budget: int, itemsize: int, *, compiled: bool
) -> int:
    """For `partitions: auto`: rows of one segment. `taken` bytes are the target's."""
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
    rows = max_rows(budget, fixed, per_row, inputs.longest + config.max_speculative_tokens)
    return rows - rows % SEGMENT_MULTIPLE or rows
