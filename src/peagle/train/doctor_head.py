"""What in a head silently costs acceptance, alone and together with data and target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.references import resolve_head
from peagle.checkpoints.references import load_config, resolve_model
from peagle.config import EngineConfig
from peagle.data.dataset import Dataset
from peagle.models.head_config import HeadConfig
from peagle.models.target import default_aux_hidden_state_layers
from peagle.train.doctor import Rows, same_target, sample_rows
from peagle.train.findings import Finding, graded
from peagle.train.making import recorded_params
from peagle.train.offline import Pair, evaluate_pair, load_pair

EVALUATED_TOKENS = 8192
EVALUATED_DEPTH = 4


def examine_head(
    head: str, model: str, config: EngineConfig, data: Path | None
) -> Iterator[Finding]:
    head_config = read_head_config(resolve_head(head))
    yield from check_config(head_config, model)
    pair = load_pair(head, model, config)  # raises on d2t, missing weights and what does not fit
    yield Finding("ok", "fit", "the head's sizes, layers and d2t fit the target")
    if data is not None:
        dataset = Dataset(data)
        rows = sample_rows(dataset)
        yield check_mask_id(head_config, rows)
        yield check_coverage(pair, rows)
        yield from check_acceptance(pair, dataset)


def check_config(head: HeadConfig, model: str) -> Iterator[Finding]:
    if not same_target(head.target_model, model):
        message = f"it was trained for {head.target_model}, not {model}"
        yield Finding("warning", "head's target", message, "fine if both name the same model")
    target = load_config(resolve_model(model))
    usual = default_aux_hidden_state_layers(int(target.num_hidden_layers))
    layers = head.aux_hidden_state_layer_ids
    message = f"the head reads layers {list(layers)}; unless told, servers take {list(usual)}"
    hint = "export writes them to eagle_aux_hidden_state_layer_ids: check that the server reads it"
    yield graded("layer ids", message, warning=layers != usual, hint=hint)
    ours, its = head.max_position_embeddings, int(target.max_position_embeddings)
    message = f"the head drafts up to position {ours}, the target's context is {its}"
    hint = "nothing is drafted beyond it: raise max_position_embeddings, train on longer rows"
    yield graded("head's context", message, warning=ours < its, hint=hint)


def check_mask_id(head: HeadConfig, rows: Rows) -> Finding:
    if head.mask_token_id is None:
        return Finding("ok", "mask id", "the mask embedding is no row of the table")
    found = sum(int((tokens == head.mask_token_id).sum()) for tokens, _ in rows)
    message = f"the mask id {head.mask_token_id} occurs {found} times in the data"
    hint = "a served token with this id gets the mask's embedding: choose an unused id"
    return graded("mask id", message, warning=False, error=found > 0, hint=hint)


def check_coverage(pair: Pair, rows: Rows) -> Finding:
    ids = pair.network.target_ids.cpu()
    tokens = torch.cat([tokens[mask] for tokens, mask in rows]).long()
    covered = float(torch.isin(tokens, ids).double().mean())
    message = f"the draft vocabulary of {len(ids)} holds {covered:.1%} of the supervised tokens"
    hint = "a token outside it is never drafted: raise head.draft_vocab_size"
    return graded(
        "draft vocabulary", message, warning=covered < 0.98, error=covered < 0.8, hint=hint
    )


def check_acceptance(pair: Pair, dataset: Dataset) -> Iterator[Finding]:
    """On a few rows: a head that is trained but reads the wrong features shows here."""
    fits = int((dataset.lengths.cumsum(0) <= EVALUATED_TOKENS).sum())
    indices = list(range(max(fits, 1)))
    k = min(EVALUATED_DEPTH, pair.network.config.max_speculative_tokens)
    params = recorded_params(dataset.manifest["made_by"])
    way, result = next(iter(evaluate_pair(pair, dataset, indices, k, params).items()))
    stats = result.groups["all"][k - 1]
    first = stats.conditional_acceptance[0] if stats.conditional_acceptance else 0.0
    message = (
        f"{first:.0%} of first drafts are accepted, mean acceptance length "
        f"{stats.mean_acceptance_length:.2f} at K={k} ({way}, {len(indices)} rows)"
    )
    hint = "near zero means wrong layer ids, features or template rather than too little training"
    yield graded("acceptance", message, warning=first < 0.3, error=first < 0.05, hint=hint)
