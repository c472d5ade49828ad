"""What tokens cost, and the line that starts what was advised."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from peagle.bench.settings import NONE, Setting
from peagle.config import SpeculativeConfig

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Cost:
    """Of one replica, which is `num_gpus` GPUs that answer at `otps`."""

    otps: float
    tokens_per_dollar: float | None = None
    dollars_per_million_tokens: float | None = None
    gpus_for_wanted_rate: int | None = None


def cost_of(
    otps: float,
    *,
    num_gpus: int = 1,
    gpu_dollars_per_hour: float | None = None,
    wanted_otps: float | None = None,
) -> Cost:
    per_dollar = None
    if gpu_dollars_per_hour:
        per_dollar = otps * SECONDS_PER_HOUR / (gpu_dollars_per_hour * num_gpus)
    # The small slack keeps 3 x 100 tokens/s from asking for a fourth GPU by rounding.
    replicas = math.ceil(wanted_otps / otps - 1e-9) if wanted_otps else None
    return Cost(
        otps=otps,
        tokens_per_dollar=per_dollar,
        dollars_per_million_tokens=1e6 / per_dollar if per_dollar else None,
        gpus_for_wanted_rate=max(1, replicas) * num_gpus if replicas is not None else None,
    )


def peagle_config(setting: Setting) -> dict[str, Any] | None:
    """For `--speculative-config` of `peagle generate` and its like; None: no speculation."""
    if setting.method == NONE:
        return None
    config = {
        "method": setting.method,
        "model": setting.head,
        "num_speculative_tokens": setting.num_speculative_tokens,
    }
    return {key: value for key, value in config.items() if value is not None}


def vllm_config(setting: Setting) -> dict[str, Any] | None:
    """For `vllm serve --speculative-config`: both kinds of head are eagle3 there."""
    config = peagle_config(setting)
    if config is None or setting.method not in ("p-eagle", "eagle3", "ngram"):
        return config
    if setting.method == "ngram":
        defaults = SpeculativeConfig(method="ngram")
        return config | {
            "prompt_lookup_max": defaults.prompt_lookup_max,
            "prompt_lookup_min": defaults.prompt_lookup_min,
        }
    parallel = {"parallel_drafting": True} if setting.method == "p-eagle" else {}
    return config | {"method": "eagle3"} | parallel
