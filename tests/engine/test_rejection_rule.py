"""The corners of rejection sampling in a step: rounding, memory, reach, the GPU's kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.engine.memory import LOGIT_BYTES
from peagle.engine.sampler import RejectionSampler, SampledSlots
from peagle.errors import RequestError
from peagle.kernels.device_batch import HEADER, DeviceBatch, make_device_batch
from peagle.kernels.reference.batch import begin_step, commit
from peagle.kernels.reference.rejection import RejectionUniforms
from peagle.kernels.step_ops import StepOps, step_ops
from peagle.models.drafter import Packing
from peagle.models.output import OutputRows
from peagle.sampling_params import SamplingParams
from tests.tiny import engines
from tests.tiny.jobs import Job, prompts
from tests.tiny.models import SHALLOW, head_drafter
from tests.train.live_memory import LiveBytes

from .test_forms_agree import HEADS, MODES, head, target

CPU = torch.device("cpu")


class GivenLogits:
    """The output layer of rows that are logits already."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def output_product(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, torch.eye(hidden.shape[1], dtype=hidden.dtype)


def given(logits: Tensor) -> OutputRows:
    return OutputRows(logits, GivenLogits())


def state_for(batch: int, depth: int, vocab_size: int) -> DeviceBatch:
    state = make_device_batch(batch, 4, depth, CPU, (depth, vocab_size))
    state.limits[:batch], state.capacity[:batch], state.num_computed[:batch] = 20, 20, 5
    state.num_prompt[:batch], state.num_drafts[:batch], state.max_drafts[:batch] = 3, depth, depth
    state.temperature[:] = 1.0
    return state


def test_a_refused_draft_that_is_drawn_again_is_no_accepted_one() -> None:
    """Where p equals q up to rounding, nothing is left of p - q, and p is drawn from."""
    vocab_size, depth = 8, 2
    state = state_for(1, depth, vocab_size)
    slots = torch.tensor([0])
    counts = begin_step(state, slots, torch.tensor([depth]), depth)
    logits = torch.full((depth + 1, vocab_size), -20.0)
    logits[:, 0] = 20.0  # token 0: also what stands behind the bonus token
    ones = torch.ones(1, depth + 1, dtype=torch.float64)
    refusing = RejectionUniforms(ones[:, :-1], 0.5 * ones)  # never 1 really: refuses where p = q
    ops = step_ops(CPU)._replace(rejection_uniforms=lambda *_: refusing)
    sampler = RejectionSampler(ops, SampledSlots(state, slots, counts.num_outputs, "sampled"))
    drafts = sampler.draft(given(logits[:depth]), 0, Packing(depth, None, depth))
    assert drafts.tolist() == [[0, 0]]
    rows = Packing(depth + 1, None, depth + 1)
    sampled = sampler.verify(given(logits), drafts, counts.num_drafts, rows)
    assert sampled.sampled_token_ids.tolist() == [[0, 0, 0]]
    committed = commit(state, slots, counts, *sampled, 100, depth)
    assert committed.report[0, :HEADER].tolist() == [1, depth, 0]  # one token, none accepted
    assert committed.num_outputs.tolist() == (counts.num_outputs + 1).tolist()


def test_probabilities_stay_within_what_the_reserve_counts() -> None:
    """Counted against the tensors that a step's choices make, drafts and verification."""
    batch, depth, vocab_size = 8, 7, 4096
    rows, made = batch * (depth + 1), LiveBytes()
    state = state_for(batch, depth, vocab_size)
    slots = torch.arange(batch)
    sampled = SampledSlots(state, slots, torch.ones_like(slots), "sampled")
    with made:
        sampler = RejectionSampler(step_ops(CPU), sampled)
        logits = torch.randn(batch * depth, vocab_size)
        drafts = sampler.draft(given(logits), 0, Packing(batch * depth, None, depth))
        sampler.verify(
            given(torch.randn(rows, vocab_size)),
            drafts,
            torch.full_like(slots, depth),
            Packing(rows, None, depth + 1),
        )
    assert made.peak <= rows * vocab_size * LOGIT_BYTES <= 4 * made.peak


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p-eagle", "eagle3, reduced vocabulary"])
def test_requests_go_on_beyond_the_drafters_positions(name: str) -> None:
    short = head_drafter(SHALLOW.make_head(target(), **HEADS[name], max_position_embeddings=24))
    params = SamplingParams(seed=8, max_tokens=40, ignore_eos=True)
    jobs = [Job(p, params) for p in prompts(3, seed=2)]
    requests, _ = engines.run_both(target(), short, 4, jobs, "rejection")
    assert [r.num_outputs for r in requests] == [40] * 3


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels then want the GPU's tensors")
@pytest.mark.parametrize("name", ["p-eagle, reduced vocabulary", "eagle3"])
def test_the_gpus_kernels_sample_the_same_in_a_step(name: str) -> None:
    """In Triton's interpreter; tests/engine/gpu has the whole step, captured."""
    params = [
        dataclasses.replace(p, max_tokens=3) for p in (MODES["mixed"][0], MODES["sampled"][0])
    ]
    jobs = [Job(text, p) for text, p in zip(prompts(2), params, strict=True)]
    pair = [engines.make_engine(target(), head(name), 2, "rejection", static=True) for _ in "ab"]
    models = pair[0].runner.models
    pair[0].runner.models = dataclasses.replace(models, ops=sampled_by_kernels(models.ops))
    ours, theirs = (engines.run(engine, jobs) for engine in pair)
    assert engines.answers_of(ours) == engines.answers_of(theirs)
    assert engines.counters(ours) == engines.counters(theirs)


def sampled_by_kernels(ops: StepOps) -> StepOps:
    from peagle.kernels.gpu import rejection, sampling

    names = ("sample_tokens", "sample_with_probs", "token_probs")
    kernels: dict[str, Any] = {name: getattr(sampling, name) for name in names}
    kernels |= {n: getattr(rejection, n) for n in ("rejection_uniforms", "verify_rejection")}
    return ops._replace(**kernels)


def test_a_request_that_drafts_deeper_than_probabilities_are_kept_is_refused() -> None:
    engine = engines.make_engine(target(), head(next(iter(HEADS))), 3, "rejection")
    engine.check_request([1, 2], SamplingParams(num_speculative_tokens=3))
    with pytest.raises(RequestError, match="keeps probabilities for"):
        engine.check_request([1, 2], SamplingParams(num_speculative_tokens=4))
