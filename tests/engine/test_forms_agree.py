"""Claim: the GPU's form (padded shapes, steps collected late) and the CPU's give the same tokens,
endings and counters, and the answers of a loop that recomputes every prefix."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from peagle.config import Verification
from peagle.engine.request import Request
from peagle.models.config import DecoderConfig
from peagle.models.drafter import Drafter
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import drafters, engines, naive
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import CONTEXT, SHALLOW, VOCAB, head_drafter

HEADS: dict[str, dict[str, Any]] = {
    "p-eagle": {"num_hidden_layers": 1},
    "p-eagle, 2 layers": {"num_hidden_layers": 2},
    "p-eagle, reduced vocabulary": {"num_hidden_layers": 2, "draft_vocab_size": 15},
    "p-eagle, windowed": {"num_hidden_layers": 2, "sliding_window": 9},
    "eagle3": {"method": "eagle3"},
    "eagle3, windowed": {"method": "eagle3", "sliding_window": 8},
    "eagle3, reduced vocabulary": {"method": "eagle3", "draft_vocab_size": 15},
    "eagle3, normed output": {"method": "eagle3", "norm_output": True, "has_lm_head": True},
}
MODES: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0.0, max_tokens=14)],
    "sampled": [SamplingParams(seed=3, max_tokens=14)],
    "filtered": [SamplingParams(seed=5, temperature=0.8, top_k=9, top_p=0.9, max_tokens=14)],
    "mixed": [
        SamplingParams(temperature=0.0, max_tokens=14),
        SamplingParams(seed=1, max_tokens=9),
        SamplingParams(seed=2, min_p=0.1, max_tokens=12),
        SamplingParams(seed=2, top_p=0.8, temperature=1.4, max_tokens=12),
    ],
}


@cache
def target() -> TargetModel:
    return SHALLOW.make_target()


@cache
def network(name: str) -> EagleNetwork:
    return SHALLOW.make_head(target(), **HEADS[name])


def head(name: str) -> Drafter:
    return head_drafter(network(name))


def jobs_of(mode: str, seed: int = 0, count: int = 4) -> list[Job]:
    params, texts = MODES[mode], prompts(count, seed, longest=24)
    return [Job(p, params[n % len(params)], joins=n) for n, p in enumerate(texts)]


def check(requests: list[Request], jobs: list[Job], verification: Verification) -> None:
    """By rejection only greedy requests have the tokens of plain decoding."""
    exact = [n for n, job in enumerate(jobs) if verification == "coupled" or job.params.greedy]
    naive.check(target(), [requests[n] for n in exact], [jobs[n] for n in exact])


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", HEADS)
def test_a_seed_gives_the_same_tokens_in_both_forms(
    name: str, mode: str, verification: Verification
) -> None:
    k = 1 + list(HEADS).index(name) % 3 * 3  # 1, 4, 7
    jobs = jobs_of(mode)
    requests, engine = engines.run_both(target(), head(name), k, jobs, verification)
    check(requests, jobs, verification)
    assert engine.stats.num_draft_tokens > 20
    by_rejection = {shape.by_rejection for shape in engines.watched(engine).shapes}
    assert (True in by_rejection) == (verification == "rejection" and mode != "greedy")


@pytest.mark.parametrize("mode", MODES)
def test_plain_decoding_is_the_same_in_both_forms(mode: str) -> None:
    jobs = jobs_of(mode)
    requests, engine = engines.run_both(target(), None, 0, jobs)
    naive.check(target(), requests, jobs)
    assert {shape.depth for shape in engines.watched(engine).shapes} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("k", range(1, 8))
@pytest.mark.parametrize("name", ["p-eagle, 2 layers", "eagle3"])
def test_steps_accept_none_some_and_all_of_their_drafts(name: str, k: int) -> None:
    jobs = jobs_of("mixed", seed=k)
    drafter = drafters.ScriptedHead(
        network(name), drafters.Script(naive.known(target(), jobs), seed=k)
    )
    requests, engine = engines.run_both(target(), drafter, k, jobs)
    naive.check(target(), requests, jobs)
    assert 0.1 < engine.stats.acceptance_rate < 0.9


@pytest.mark.parametrize("name", ["p-eagle", "eagle3"])
def test_drafts_are_accepted_and_refused_at_every_depth_by_rejection(name: str) -> None:
    jobs = [Job(p, SamplingParams(seed=n, max_tokens=30)) for n, p in enumerate(prompts(6))]
    _, engine = engines.run_both(target(), head(name), 3, jobs, "rejection")
    drafted = engine.stats.num_draft_tokens_per_pos
    accepted = engine.stats.num_accepted_tokens_per_pos
    assert all(0 < a < d for d, a in zip(drafted, accepted, strict=True))


@pytest.mark.parametrize("name", ["p-eagle, 2 layers", "eagle3"])
def test_requests_may_want_fewer_more_or_no_drafts_than_the_engine(name: str) -> None:
    depths = (0, 2, 16, None, 5)
    jobs = [
        job._replace(params=dataclasses.replace(job.params, num_speculative_tokens=depth))
        for job, depth in zip(jobs_of("mixed", seed=4, count=5), depths, strict=True)
    ]
    drafter = drafters.ScriptedHead(network(name), drafters.Script(naive.known(target(), jobs)))
    requests, engine = engines.run_both(target(), drafter, 3, jobs)
    naive.check(target(), requests, jobs)
    longest = [len(r.stats.num_draft_tokens_per_pos) for r in requests]
    assert longest[:2] + longest[3:] == [0, 2, 3, 5]
    assert longest[2] > 5
    assert max(shape.depth for shape in engines.watched(engine).shapes) == 16


@pytest.mark.parametrize("name", ["p-eagle", "eagle3"])
def test_depth_may_rise_and_fall_between_steps(name: str) -> None:
    """A shallow step reads the caches that a deep one left."""
    long, short = (SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (30, 3))
    texts, depths = prompts(6, seed=9), (1, 7, 2, 7, 0, 5)
    jobs = [
        Job(text, dataclasses.replace(short if n else long, num_speculative_tokens=k), joins=3 * n)
        for n, (text, k) in enumerate(zip(texts, depths, strict=True))
    ]
    drafter = drafters.ScriptedHead(
        network(name), drafters.Script(naive.known(target(), jobs), seed=1)
    )
    requests, engine = engines.run_both(target(), drafter, 4, jobs)
    naive.check(target(), requests, jobs)
    assert len({shape.depth for shape in engines.watched(engine).shapes}) > 2


@st.composite
def workloads(draw: st.DrawFn) -> tuple[str, int, list[Job]]:
    rng = random.Random(draw(st.integers(0, 10**6)))
    k, jobs = draw(st.integers(1, 7)), []
    for n in range(draw(st.integers(1, 6))):
        mode = draw(st.sampled_from(list(MODES)))
        params = dataclasses.replace(
            rng.choice(MODES[mode]),
            seed=rng.randrange(2**63),
            max_tokens=rng.choice((1, 2, 3, 8, 15)),
            num_speculative_tokens=rng.choice([None, None, 0, 1, k]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 3)))),
        )
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 16, 17, 32, 40)))]
        jobs.append(Job([n, *prompt][: len(prompt)], params, joins=rng.randrange(8)))
    return draw(st.sampled_from(list(HEADS))), k, jobs


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@settings(max_examples=12, deadline=None)
@given(workloads(), st.integers(1, 8), st.sampled_from([1, 3, 4, 16]))
def test_any_workload_is_the_same_in_both_forms(
    verification: Verification, work: tuple[str, int, list[Job]], seqs: int, block_size: int
) -> None:
    """More requests than slots, too; whoever ends hands its slot on at once."""
    name, k, jobs = work
    drafter = head(name)
    if verification == "coupled":
        drafter = drafters.ScriptedHead(
            network(name), drafters.Script(naive.known(target(), jobs), k)
        )
    options = {"max_num_seqs": seqs, "block_size": block_size}
    requests, _ = engines.run_both(target(), drafter, k, jobs, verification, **options)
    check(requests, jobs, verification)


# --- targets of other shapes: biases, norms of queries and keys, tied tables, windows

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "query biases": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "query and key norms": Qwen3Config(**SIZES, tie_word_embeddings=True),
}


def build(config: PretrainedConfig) -> TargetModel:
    model = TargetModel(DecoderConfig.from_transformers(config)).to(torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            base = 1.0 if weight.dim() == 1 else 0.0  # norms; biases of about 1 do as well
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(base + 0.3 * noise)
    return model.requires_grad_(False).eval()


def check_target(model: TargetModel, method: str, **changes: Any) -> None:
    params = (GREEDY, SamplingParams(seed=6, top_p=0.9, max_tokens=15, ignore_eos=True))
    texts = prompts(4, seed=3, longest=30)
    jobs = [Job(p, params[n % 2], joins=n) for n, p in enumerate(texts)]
    script = drafters.Script(naive.known(model, jobs), seed=3)
    drafter = drafters.ScriptedHead(SHALLOW.make_head(model, method, **changes), script)
    requests, _ = engines.run_both(model, drafter, 4, jobs, max_num_batched_tokens=64)
    naive.check(model, requests, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("name", CONFIGS)
def test_targets_of_other_families_are_the_same_in_both_forms(name: str, method: str) -> None:
    check_target(build(CONFIGS[name]), method)


@pytest.mark.parametrize("windows", [(5, None), (None, 17), (3, 3)])
def test_sliding_windows_are_the_same_in_both_forms(windows: tuple[int | None, ...]) -> None:
    check_target(SHALLOW.make_target(sliding_windows=windows), "p-eagle", num_hidden_layers=2)
