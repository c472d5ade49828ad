"""Claim: families whose layers run by modules say the same in captured steps as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peagle.checkpoints.targets import has_native_target, load_adapted, load_target
from peagle.engine.engine import Engine, Speculation
from tests.checkpoints.test_stored_tensors import save_fp8, save_mxfp4
from tests.tiny import engines
from tests.tiny.families import ADAPTED, FAMILIES, RECOMPUTED
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW, VOCAB, head_drafter, save_reference

from .captured import K, engine_config

pytestmark = pytest.mark.gpu
NAMES = ("qwen3-moe", "gpt-oss", "gemma2", "gemma3", "gemma4", "gemma4-moe", "olmo2", "granite")
LOW_BIT = {"mxfp4": save_mxfp4, "fp8": save_fp8}
JOBS = [Job(p, GREEDY, joins=n) for n, p in enumerate([*prompts(3, seed=5), list(range(30))])]


@pytest.mark.parametrize("nodes", [None, 6])
@pytest.mark.parametrize("name", [*NAMES, "gpt-neox", "lfm2"])
def test_captured_steps_say_what_a_cpu_says(name: str, nodes: int | None, tmp_path: Path) -> None:
    family = (FAMILIES | ADAPTED | RECOMPUTED)[name]
    save_reference(tmp_path, family(vocab_size=VOCAB, max_position_embeddings=96))
    assert_devices_agree(tmp_path, nodes)


@pytest.mark.parametrize("nodes", [None, 6])
@pytest.mark.parametrize("kind", LOW_BIT)
def test_low_bit_experts_say_what_expanded_ones_say_on_a_cpu(
    kind: str, nodes: int | None, tmp_path: Path
) -> None:
    LOW_BIT[kind](tmp_path)
    assert_devices_agree(tmp_path, nodes)


def assert_devices_agree(folder: Path, nodes: int | None) -> None:
    load = load_target if has_native_target(folder) else load_adapted
    answers = []
    for device in ("cpu", "cuda"):
        target = load(folder, dtype=torch.float32, device=torch.device(device))
        if nodes is not None and not target.rolls_back:
            pytest.skip("drafts are chains")
        drafter = head_drafter(SHALLOW.make_head(target.cpu()).to(device))
        target.to(device)
        engine = Engine(
            target, engine_config(), speculation=Speculation(drafter, K, "coupled", nodes)
        )
        answers.append(engines.answers_of(engines.run(engine, JOBS)))
    assert answers[0] == answers[1]
