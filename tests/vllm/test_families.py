"""Experts, sinks, windows and soft caps: both engines give the same tokens with the same head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from peagle import SamplingParams
from peagle.config import EngineConfig
from peagle.outputs import RequestOutput
from tests.tiny.families import CAPS, EXPERTS, FAMILIES, GEMMA4
from tests.tolerance import rounding
from tests.vllm.interop import Outcome, embedded, vllm
from tests.vllm.released_head import (
    CONTEXT,
    HEAD_DIM,
    TARGET_LAYERS,
    write_released_head,
    write_target,
)
from tests.vllm.test_released_layout import prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

K = 4
ENGINE = EngineConfig(dtype="float32", max_model_len=CONTEXT, max_num_seqs=8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=1)
SLIDING, FULL = "sliding_attention", "full_attention"
# The window is far shorter than prompts and answers; vLLM's GPT-OSS alternates whatever is said.
LAYERS = {"sliding_window": 16, "layer_types": [SLIDING, FULL] * (TARGET_LAYERS // 2)}
HEAD_LAYERS = 1  # vLLM cuts layers of a kind into groups, and wants the head's in one of them
# Its attention on a CPU takes heads of 32 and more.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3-moe": EXPERTS | {"moe_intermediate_size": 32, "norm_topk_prob": True},
    "gpt-oss": {"num_local_experts": 6, "num_experts_per_tok": 3, **LAYERS},
    "gemma3": {**LAYERS, **CAPS},
    "gemma4": {
        **GEMMA4,
        **LAYERS,
        "head_dim": HEAD_DIM,
        "global_head_dim": 64,
        "final_logit_softcapping": 2.0,
    },
}


class Case(NamedTuple):
    ours: Outcome
    theirs: list[RequestOutput]
    why_plain: str | None  # why vLLM drafts nothing for such a target


@pytest.fixture(scope="module", params=CHANGES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    kind = FAMILIES[request.param].kind
    target = str(write_target(folder / "target", kind, **CHANGES[request.param]))
    head = str(write_released_head(folder / "head", Path(target), HEAD_LAYERS))
    llm = embedded(target, head, K, ENGINE)
    given = prompts(llm.engine.target.config.vocab_size, 8)
    ours = Outcome(llm.generate(given, GREEDY), llm.stats)
    why_plain = _why_no_head(Path(target))
    with vllm(target, None if why_plain else head, K, ENGINE) as backend:
        yield Case(ours, backend.generate(given, GREEDY), why_plain)


def _why_no_head(target: Path) -> str | None:
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    (name,) = json.loads((target / "config.json").read_text())["architectures"]
    model = ModelRegistry._try_load_model_cls(name)
    return None if supports_eagle3(model) else f"vLLM's {name} does not support EAGLE3 interface"


def test_both_engines_give_the_same_tokens(case: Case) -> None:
    for mine, other in zip(case.ours.outputs, case.theirs, strict=True):
        assert other.outputs[0].token_ids == mine.outputs[0].token_ids


def test_both_engines_give_the_same_logprobs(case: Case) -> None:
    """A target's habit outweighs its layers: tokens alone would forgive a wrong one."""
    close = rounding(terms=96, depth=TARGET_LAYERS + 1)
    for mine, other in zip(case.ours.outputs, case.theirs, strict=True):
        pairs = zip(mine.outputs[0].logprobs or [], other.outputs[0].logprobs or [], strict=True)
        found = [(a[token].logprob, b[token].logprob) for a, b in pairs for token in a]
        assert len(found) >= GREEDY.max_tokens
        ours, theirs = zip(*found, strict=True)
        assert theirs == pytest.approx(ours, abs=close)


def test_both_engines_keep_the_same_drafts(case: Case) -> None:
    if case.why_plain is not None:
        pytest.skip(case.why_plain)
    for mine, other in zip(case.ours.outputs, case.theirs, strict=True):
        assert other.stats.num_drafts == mine.stats.num_drafts
        assert other.stats.num_accepted_tokens_per_pos == mine.stats.num_accepted_tokens_per_pos
    kept = case.ours.stats.acceptance_rate
    assert 0.02 < kept < 0.98, "a head that is always right or always wrong proves nothing"
