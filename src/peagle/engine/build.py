"""Which form of the engine serves a target: chosen once, by where its weights are."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.config import EngineConfig
from peagle.engine.engine import Engine, Speculation
from peagle.models.lane_drafters import lane_drafter
from peagle.models.target import TargetModel


def build_engine(
    target: TargetModel,
    config: EngineConfig,
    *,
    eos_token_ids: Sequence[int] = (),
    speculation: Speculation | None = None,
) -> Engine:
    """On a GPU steps run as CUDA graphs over lanes; elsewhere, and for a drafter that works on
    the host (n-gram), step by step."""
    on_gpu = target.embed_tokens.weight.is_cuda
    drafts_on_host = speculation is not None and lane_drafter(speculation.drafter) is None
    if not on_gpu or drafts_on_host:
        return Engine(target, config, eos_token_ids=eos_token_ids, speculation=speculation)
    from peagle.engine.lanes.engine import LaneEngine

    return LaneEngine(target, config, eos_token_ids=eos_token_ids, speculation=speculation)
