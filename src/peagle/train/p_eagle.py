"""One segment of P-EAGLE training: rows in, loss out. The network is the one that serves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.models.eagle import EagleNetwork
from peagle.models.rollouts import rollout_rows
from peagle.train.attention import attention_for
from peagle.train.features import Features
from peagle.train.partition import Segment


def segment_hidden(network: EagleNetwork, segment: Segment, features: Features) -> Tensor:
    """Hidden states [R, H], before the final norm, of every row of the segment."""
    here = slice(segment.first, segment.last)
    embeddings, row_features = rollout_rows(
        network, features.next_tokens[here], features.aux_hidden_states[here], segment.num_masks
    )
    padding = len(segment.positions) - len(embeddings)
    attention = attention_for(segment.elements, segment.positions)
    out: Tensor = network(
        F.pad(embeddings, (0, 0, 0, padding)),
        F.pad(row_features, (0, 0, 0, padding)),
        segment.positions,
        attention,
    )
    return out


def charged_states(network: EagleNetwork, segment: Segment, features: Features) -> Tensor:
    """States after the final norm [C, H] of the charged rows: the only ones that get logits."""
    hidden = segment_hidden(network, segment, features)
    out: Tensor = network.norm(torch.index_select(hidden, 0, segment.rows))
    return out
