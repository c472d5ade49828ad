"""Our sampling parameters as vLLM's: every field arrives, and what vLLM cannot do is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from peagle.backends.vllm.requests import check_params, vllm_params
from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams

NOT_OF_VLLM = {"num_speculative_tokens", "num_draft_nodes"}  # checked: vLLM's K is the engine's


def test_every_field_of_ours_is_handed_over() -> None:
    ours = {field.name for field in fields(SamplingParams)}
    assert set(vllm_params(SamplingParams())) == ours - NOT_OF_VLLM


def test_values_arrive_in_the_types_that_vllm_takes() -> None:
    given = vllm_params(
        SamplingParams(
            temperature=0.7,
            top_k=-1,
            stop="end",
            stop_token_ids=(4, 5),
            bad_words=("no",),
            logit_bias={3: 1.5},
            seed=-1,
            max_tokens=None,
        )
    )
    assert given["temperature"] == 0.7
    assert given["top_k"] == 0
    assert given["stop"] == ["end"]
    assert given["stop_token_ids"] == [4, 5]
    assert given["bad_words"] == ["no"]
    assert given["logit_bias"] == {3: 1.5}
    assert 0 <= given["seed"] < 2**63
    assert given["max_tokens"] is None


def test_greedy_is_greedy_there_too() -> None:
    assert vllm_params(SamplingParams(temperature=1e-6))["temperature"] == 0.0


@pytest.mark.parametrize(
    "params", [SamplingParams(min_p=0.1), SamplingParams(logit_bias={3: -1.0})]
)
def test_filters_are_refused_with_a_drafter_and_served_without(params: SamplingParams) -> None:
    check_params(params, 0)
    with pytest.raises(RequestError, match=r"min_p|logit_bias"):
        check_params(params, 5)


def test_a_build_that_cannot_verify_sampled_drafts_gets_greedy_requests_alone() -> None:
    check_params(SamplingParams(temperature=0.0), 5, sampled_drafts=False)
    check_params(SamplingParams(temperature=1.0), 0, sampled_drafts=False)
    with pytest.raises(RequestError, match=r"temperature=1\.0"):
        check_params(SamplingParams(temperature=1.0), 5, sampled_drafts=False)


@pytest.mark.parametrize("asked", [0, 3, 6])
def test_a_request_cannot_have_a_k_of_its_own(asked: int) -> None:
    check_params(SamplingParams(num_speculative_tokens=None), 5)
    check_params(SamplingParams(num_speculative_tokens=5), 5)  # the engine's
    with pytest.raises(RequestError, match=f"num_speculative_tokens={asked}"):
        check_params(SamplingParams(num_speculative_tokens=asked), 5)
