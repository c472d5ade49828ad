"""Claim: kernels that begin before the one ahead has ended give what they give one by one.

bfloat16 and the engine's own shapes, since the other tests of captured steps have neither: with 8
slots of 8 rows the output product keeps no logits, tiles have 64 rows, norms and rotations are
kernels of their own, and a step holds several prompts beside decode rows. Both engines launch the
same kernels in the same order, so tokens and counters must be equal; the counters show a wrong
draft.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from peagle.config import EngineConfig
from peagle.engine.engine import Engine, Speculation
from peagle.kernels.policy import FAST
from peagle.models.drafter import Drafter
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import engines
from tests.tiny.jobs import Job
from tests.tiny.models import SHALLOW, head_drafter

from .captured import captured_shapes

pytestmark = pytest.mark.gpu

SLOTS, K, ROUNDS = 8, 7, 3
VOCAB, FAVOURED = 512, 8
DEVICE, DTYPE = "cuda", torch.bfloat16
# The head's are the target's: most of their kernels are the same.
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 1024,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
HEADS: dict[str, dict[str, Any]] = {
    "p-eagle": {"num_hidden_layers": 2, "draft_vocab_size": 300},
    "eagle3": {"method": "eagle3"},
    "eagle3, normed output": {"method": "eagle3", "norm_output": True},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def few_shapes() -> None:
    """Instead of the folder's: the engine's own shapes."""


def make_models(name: str) -> tuple[TargetModel, Drafter]:
    target = SHALLOW.make_target(
        torch.float32, vocab_size=VOCAB, max_position_embeddings=256, **SIZES
    )
    # Few tokens are ever the best, so a random head drafts some of them.
    target.lm_head.weight[FAVOURED:] *= 0.1
    head = SHALLOW.make_head(target, **SIZES | HEADS[name])
    move(target)
    move(head)
    return target, head_drafter(head)


def move(model: TargetModel | EagleNetwork) -> None:
    """Rotary tables stay float32, as in a loaded model: else no kernel takes the layers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPE)
    model.to(DEVICE)
    assert model.rotary.cos.dtype is torch.float32


def make_engine(name: str) -> Engine:
    target, drafter = make_models(name)
    config = EngineConfig(max_num_seqs=SLOTS, max_num_batched_tokens=512)
    return Engine(target, config, speculation=Speculation(drafter, K, "coupled"))


def jobs() -> list[Job]:
    """Contexts of 65 to 128 positions alone: attention is divided in one way."""
    rng = random.Random(0)
    texts = [[rng.randrange(VOCAB) for _ in range(rng.randint(65, 80))] for _ in range(20)]
    return [Job(text, GREEDY) for text in texts]


def outcomes(engine: Engine) -> list[tuple[list[list[int]], list[dict[str, Any]]]]:
    """Of several rounds: what overlaps, and by how much, is never quite the same."""
    rounds = [engines.run(engine, jobs()) for _ in range(ROUNDS)]
    return [(engines.answers_of(requests), engines.counters(requests)) for requests in rounds]


def check_reach(engine: Engine) -> None:
    """That the run had the rows which this file is for."""
    shapes = captured_shapes(engine)
    assert max(shape.batch * shape.depth for shape in shapes) > FAST.max_logit_rows
    rows = [s.batch * (s.depth + 1) + s.num_items * s.rows_per_item for s in shapes]
    assert max(rows) > FAST.max_fused_rows > min(rows)
    assert engine.stats.num_accepted_tokens > 50


@pytest.mark.parametrize("name", HEADS)
def test_overlapping_kernels_give_the_tokens_and_drafts_of_those_that_do_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peagle.kernels.gpu import overlap

    if not overlap.overlapping()["OVERLAPS"]:
        pytest.skip("no kernel of this GPU begins early")
    overlapping = make_engine(name)
    found = outcomes(overlapping)
    check_reach(overlapping)
    monkeypatch.setattr(overlap, "_is_supported", lambda: False)
    assert not overlap.overlapping()["OVERLAPS"]
    assert found == outcomes(make_engine(name))  # with graphs of its own
