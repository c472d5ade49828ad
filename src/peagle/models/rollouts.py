"""Flat rows of parallel prediction: the training-side counterpart of `PEagleDrafter.propose`."""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.models.attention import Attention
from peagle.models.eagle import EagleNetwork
from peagle.models.masks import Elements


def full_rollouts(num_positions: int, depths: int) -> Elements:
    """Every anchor with every depth 0..depths-1 of one document: what COD thins out."""
    anchor = torch.arange(num_positions).repeat(depths)
    depth = torch.arange(depths).repeat_interleave(num_positions)
    return Elements(anchor, depth, torch.zeros_like(anchor))


def rollout_hidden(
    network: EagleNetwork,
    elements: Elements,
    token_ids: Tensor,  # [n]: the token at p+1 for each position p of depth 0
    aux_hidden_states: Tensor,  # [n, 3H]: the target's hidden states at p
    attention: Attention,
) -> Tensor:
    """Hidden states [N, H] of all elements; `anchor` indexes token_ids and aux_hidden_states."""
    is_mask = (elements.depth > 0)[:, None]
    embeddings = torch.where(
        is_mask, network.mask_embedding, network.embed(token_ids)[elements.anchor]
    )
    features = torch.where(
        is_mask, network.mask_feature(), network.features(aux_hidden_states)[elements.anchor]
    )
    out: Tensor = network(embeddings, features, elements.positions, attention)
    return out


def rollout_rows(
    network: EagleNetwork,
    token_ids: Tensor,  # [n]: the token at p+1 for each real row
    aux_hidden_states: Tensor,  # [n, 3H]
    num_masks: int,
) -> tuple[Tensor, Tensor]:
    """Embeddings and features [n + num_masks, H]: the real rows in order, then mask rows.

    The same rows as `rollout_hidden` makes where depth 0 comes first, without its gathers.
    """
    masks = network.mask_embedding.expand(num_masks, -1)
    embeddings = torch.cat((network.embed(token_ids), masks))
    mask_features = network.mask_feature().expand(num_masks, -1)
    return embeddings, torch.cat((network.features(aux_hidden_states), mask_features))
