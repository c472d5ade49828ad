"""Speculation over a quantised target gives that target's own answers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from peagle.config import EngineConfig
from peagle.engine.llm import LLM
from peagle.engine.loading import load_engine_target
from peagle.errors import ConfigError
from peagle.models.fp8 import Fp8Linear, quantize_linears
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import drafters, engines, naive
from tests.tiny.jobs import Job, prompts
from tests.tiny.models import SHALLOW, head_drafter

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
JOBS = [Job(p, GREEDY, joins=n) for n, p in enumerate(prompts(5, seed=3, longest=20))]
SEEDED = SamplingParams(seed=5, max_tokens=16, ignore_eos=True)


@cache
def target(dtype: torch.dtype) -> TargetModel:
    model = SHALLOW.make_target(dtype)
    quantize_linears(model)
    return model


def answers(model: TargetModel, jobs: list[Job], method: str | None, k: int) -> list[list[int]]:
    drafter = head_drafter(SHALLOW.make_head(model, method)) if method else None
    return engines.answers_of(engines.run(engines.make_engine(model, drafter, k), jobs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("k", [1, 4])
def test_greedy_speculation_gives_the_plain_answers_of_the_same_quantised_target(
    dtype: torch.dtype, method: str, k: int
) -> None:
    plain = answers(target(dtype), JOBS, None, k)
    assert answers(target(dtype), JOBS, method, k) == plain
    if dtype is torch.float64:
        assert plain == [naive.answer(target(dtype), job) for job in JOBS]


def test_seeded_speculation_gives_the_plain_answers_of_the_same_quantised_target() -> None:
    model, jobs = target(torch.float64), [job._replace(params=SEEDED) for job in JOBS]
    assert answers(model, jobs, "p-eagle", 4) == answers(model, jobs, None, 4)


def test_drafts_are_accepted_and_rejected_on_the_way() -> None:
    model = target(torch.float64)
    known = [j.prompt + naive.answer(model, j) for j in JOBS]
    engine = engines.make_engine(model, drafters.mixed(known), 4)
    assert engines.answers_of(engines.run(engine, JOBS)) == [k[-24:] for k in known]
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


def test_the_quantised_target_is_another_model() -> None:
    plain = SHALLOW.make_target(torch.float64)
    assert answers(plain, JOBS, None, 4) != answers(target(torch.float64), JOBS, None, 4)


def test_llm_quantises_the_target_and_not_the_head(model_folder: Path, head_folder: Path) -> None:
    llm = LLM(
        str(model_folder),
        device="cpu",
        quantization="fp8",
        speculative_config={"model": str(head_folder)},
    )
    layers = llm.engine.target.layers
    assert sum(isinstance(m, Fp8Linear) for m in layers.modules()) == 4 * len(layers)
    assert isinstance(llm.engine.target.lm_head, torch.nn.Linear)
    drafter = llm.engine.speculation.drafter  # type: ignore[union-attr]
    head = drafter.network  # type: ignore[attr-defined]
    assert not any(isinstance(m, Fp8Linear) for m in head.modules())
    (answer,) = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=4))
    assert answer.outputs[0].token_ids


def test_an_unknown_quantization_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization='int4' does not fit .*use 'fp8'"):
        LLM(str(model_folder), quantization="int4")


def test_weights_that_do_not_fit_are_one_line(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB ...")

    monkeypatch.setattr("peagle.engine.loading.load_target", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 29, 8 << 30))
    with pytest.raises(ConfigError) as caught:
        load_engine_target(model_folder, EngineConfig(device="cpu", dtype="bfloat16"))
    assert caught.value.message == (
        f"{model_folder} in bfloat16 does not fit: the GPU has 1.50 GiB free of 8.00 GiB"
    )
