"""Tiny lane engines whose steps are captured on the GPU, in few shapes.

Most of these tests' time is Triton's compiler: some 60 kernels, and as many again for every other
size that it tells apart. So all engines have the same sizes, each decode step BATCH lanes (filled
up with dummies) and each prefill step one item; no pass has more than 16 rows.
"""

from __future__ import annotations

from typing import Any

import torch
from peagle.engine.lanes.engine import LaneEngine
from peagle.engine.lanes.steps import PREFILL_ITEM, DecodeShape

from peagle.config import EngineConfig, Verification
from peagle.engine.engine import Engine, Speculation
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel

from .. import tiny

BATCH, K = 4, 2
# Multiples of 16 are compiled apart, so the law's test (4 tokens) would pay for VOCAB = 40: 2 * 40
# is one. Attention is divided beyond 128 positions.
CONTEXT, VOCAB = 252, 44
OPTIONS: dict[str, Any] = {"max_num_seqs": BATCH, "block_size": 4}
HEADS: dict[str, dict[str, Any]] = {
    "p-eagle": {"num_hidden_layers": 2, "draft_vocab_size": 15},
    "eagle3": {"method": "eagle3"},
}


def models(device: str, head: dict[str, Any], **changes: Any) -> tuple[TargetModel, Drafter]:
    sizes = {"max_position_embeddings": CONTEXT, "vocab_size": VOCAB} | changes
    target = tiny.make_target(torch.float32, **sizes)
    network = tiny.make_head(target, **head)
    return target.to(device), tiny.head_drafter(network.to(device))


def engine_config(**options: Any) -> EngineConfig:
    return EngineConfig(**OPTIONS | {"max_num_batched_tokens": PREFILL_ITEM} | options)


def captured_engine(
    target: TargetModel, drafter: Drafter, verification: Verification, **options: Any
) -> LaneEngine:
    """As the engine is built, without anything that watches it."""
    speculation = Speculation(drafter, K, verification)
    return LaneEngine(target, engine_config(**options), speculation=speculation)


def plain_engine(name: str, verification: Verification) -> Engine:
    """The oracle: the engine without lanes, on the CPU."""
    return tiny.make_engine(*models("cpu", HEADS[name]), K, verification, **OPTIONS)


def decode_shapes(engine: LaneEngine) -> set[DecodeShape]:
    """Those that were captured."""
    return set(engine.steps._decode)
