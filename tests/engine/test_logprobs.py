"""Log-probabilities are those of the plain target before any adjustment, drafts or not."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from peagle.engine.host_sampling import raw_logprobs
from peagle.engine.llm import LLM
from peagle.engine.request import Request
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW, VOCAB, head_drafter

PROMPTS = prompts(3, seed=14)


@cache
def target() -> TargetModel:
    return SHALLOW.make_target(torch.float64)


def check(request: Request, wanted: int) -> None:
    raw = naive.logits_of(target(), request.token_ids)[len(request.prompt_token_ids) - 1 : -1]
    log_probs = raw.log_softmax(-1)
    assert len(request.logprobs) == request.num_outputs
    for token, entry, row in zip(
        request.output_token_ids, request.logprobs, log_probs, strict=True
    ):
        assert entry.token_ids[0] == token
        best = row.sort(descending=True)
        assert entry.token_ids[1:] == best.indices[:wanted].tolist()
        expected = torch.cat((row[token, None], best.values[:wanted]))
        torch.testing.assert_close(
            torch.tensor(entry.logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-9
        )
        rank = best.indices.tolist().index(token) + 1
        assert entry.ranks == [rank, *range(1, len(entry.token_ids))]


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("method", ["plain", "mixed", "p-eagle"])
@pytest.mark.parametrize("wanted", [0, 1, 5, VOCAB + 10])
def test_logprobs_are_the_plain_targets_raw_ones(method: str, wanted: int, static: bool) -> None:
    modes = [
        SamplingParams(temperature=0.0, logprobs=wanted, max_tokens=12),
        SamplingParams(seed=1, temperature=1.5, top_k=7, logprobs=wanted, max_tokens=12),
        SamplingParams(seed=2, logit_bias={3: 5.0}, presence_penalty=1.0, logprobs=wanted),
    ]
    jobs = [Job(p, mode) for p, mode in zip(PROMPTS, modes, strict=True)]
    known = [j.prompt + naive.answer(target(), j) for j in jobs]
    drafter = {
        "plain": lambda: None,
        "mixed": lambda: drafters.mixed(known),
        "p-eagle": lambda: head_drafter(SHALLOW.make_head(target())),
    }[method]()
    for request in engines.run(engines.make_engine(target(), drafter, 5, static=static), jobs):
        check(request, min(wanted, VOCAB))


@both_forms
def test_rejection_reports_the_targets_logprobs_too(static: bool) -> None:
    drafter = head_drafter(SHALLOW.make_head(target()))
    engine = engines.make_engine(target(), drafter, 4, "rejection", static=static)
    params = SamplingParams(logprobs=2, max_tokens=12)
    for request in engines.run(engine, [Job(p, params) for p in PROMPTS]):
        check(request, 2)


def test_logprobs_are_cut_where_a_stop_token_ends_the_answer() -> None:
    plain = naive.answer(target(), Job(PROMPTS[0], GREEDY))
    params = SamplingParams(temperature=0.0, logprobs=1, stop_token_ids=[plain[4]])
    engine = engines.make_engine(target(), drafters.oracle([PROMPTS[0] + plain]), 16)
    (request,) = engines.run(engine, [Job(PROMPTS[0], params)])
    assert request.num_outputs <= 5
    check(request, 1)


@pytest.mark.parametrize("wanted", [0, 2])
def test_tied_tokens_share_the_best_of_their_ranks(wanted: int) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0]]).expand(7, -1)
    entries = raw_logprobs(logits, range(7), wanted)
    assert [entry.ranks[0] for entry in entries] == [6, 1, 3, 1, 3, 3, 7]
    assert all(entry.ranks[1:] == list(range(1, wanted + 1)) for entry in entries)


def test_none_are_kept_unless_asked_for() -> None:
    (request,) = engines.run(engines.make_engine(target()), [Job(PROMPTS[0], GREEDY)])
    assert request.logprobs == []


def test_the_llm_names_tokens_and_sums_the_chosen_ones(plain_llm: LLM, spec_llm: LLM) -> None:
    params = SamplingParams(seed=5, logprobs=3, max_tokens=10, ignore_eos=True)
    tokenizer = plain_llm.get_tokenizer()
    for llm in (plain_llm, spec_llm):
        answer = llm.generate("abc", params)[0].outputs[0]
        assert answer.logprobs is not None
        total = 0.0
        for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            assert token in entry
            assert 3 <= len(entry) <= 4
            assert all(e.decoded_token == tokenizer.decode([t]) for t, e in entry.items())
            assert sorted(e.rank for e in entry.values())[:3] == [1, 2, 3]
            total += entry[token].logprob
        assert answer.cumulative_logprob == pytest.approx(total)
    assert llm.generate("abc", SamplingParams())[0].outputs[0].logprobs is None
