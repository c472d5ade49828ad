"""The best token of each row straight from its hidden state: the definition, by way of logits.

Shapes: R rows, H hidden, V columns of logits; `ids` as in kernels/reference/sampling.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.reference.sampling import SampledTokens, sample_tokens


def best_tokens(hidden: Tensor, weight: Tensor, ids: Tensor | None) -> SampledTokens:
    """The column of each row's largest logit, the lowest of equals.

    hidden  # [R, H], normed
    weight  # [V, H]
    ids     # [V]

    Logits are sums in float32 or better, compared as they are, never rounded.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    return sample_tokens(F.linear(hidden.to(wide), weight.to(wide)), None, ids)
