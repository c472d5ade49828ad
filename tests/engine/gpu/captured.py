"""Tiny engines whose steps are captured on the GPU, in few shapes.

Most of these tests' time is Triton's compiler: some 60 kernels, and as many again for every other
size that it tells apart. So all engines have the same sizes: each step has BATCH slots, some of
them padding, and ITEMS items of prompt rows or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from peagle.config import EngineConfig, Verification
from peagle.engine.engine import Engine, Speculation
from peagle.engine.runner import ROWS_PER_ITEM
from peagle.engine.step import StepShape
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from tests.tiny import engines
from tests.tiny.models import SHALLOW, head_drafter

BATCH, K = 4, 2
ITEMS = 4  # one for each slot: a step has at most 16 prompt rows
# Multiples of 16 are compiled apart, so the distribution's test (4 tokens) would pay for VOCAB =
# 40: 2 * 40 is one. Attention is divided beyond 128 positions.
CONTEXT, VOCAB = 252, 44
# Engines serve several tests: a prefix cache would let the later ones compute less.
OPTIONS: dict[str, Any] = {"max_num_seqs": BATCH, "block_size": 4, "enable_prefix_caching": False}
HEADS: dict[str, dict[str, Any]] = {
    "p-eagle": {"num_hidden_layers": 2, "draft_vocab_size": 15},
    "eagle3": {"method": "eagle3"},
    "p-eagle, windowed": {"num_hidden_layers": 2, "sliding_window": 150},
}
CORRECTED = HEADS["p-eagle"] | {"correction_size": 24}


def models(device: str, head: dict[str, Any], **changes: Any) -> tuple[TargetModel, Drafter]:
    sizes = {"max_position_embeddings": CONTEXT, "vocab_size": VOCAB} | changes
    target = SHALLOW.make_target(torch.float32, **sizes)
    network = SHALLOW.make_head(target, **head)
    return target.to(device), head_drafter(network.to(device))


def engine_config(**options: Any) -> EngineConfig:
    return EngineConfig(**OPTIONS | {"max_num_batched_tokens": ROWS_PER_ITEM} | options)


def captured_engine(
    target: TargetModel,
    drafter: Drafter,
    verification: Verification,
    nodes: int | None = None,
    eos: Sequence[int] = (),
    *,
    auto: bool = False,
    **options: Any,
) -> Engine:
    """As users build it: static shapes and overlap, because the target is on a GPU."""
    speculation = Speculation(drafter, K, verification, nodes, is_auto=auto)
    config = engine_config(**options)
    return Engine(target, config, eos_token_ids=eos, speculation=speculation)


def exact_engine(
    head: dict[str, Any], verification: Verification, nodes: int | None = None
) -> Engine:
    """The oracle: exact shapes, on the CPU."""
    return engines.make_engine(*models("cpu", head), K, verification, nodes=nodes, **OPTIONS)


def captured_shapes(engine: Engine) -> set[StepShape]:
    return set(engine.runner._graphs)
