"""Up to the end of the context, and where the head's positions end before the target's."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams

from . import tiny
from .tiny import CONTEXT, VOCAB, Job

ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@cache
def target() -> TargetModel:
    return tiny.make_target(torch.float64)


def prompt_of(length: int) -> list[int]:
    return [(7 * n) % VOCAB for n in range(length)]


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, CONTEXT - 11])
@pytest.mark.parametrize("method", ["plain", "oracle", "p-eagle", "eagle3"])
def test_requests_run_exactly_up_to_the_context(length: int, method: str) -> None:
    job = Job(prompt_of(length), ENDLESS)
    expected = tiny.naive(target(), job)
    assert len(expected) == CONTEXT - length
    drafter = {
        "plain": lambda: None,
        "oracle": lambda: tiny.oracle([job.prompt + expected]),
        "p-eagle": lambda: tiny.head_drafter(tiny.make_head(target())),
        "eagle3": lambda: tiny.head_drafter(tiny.make_head(target(), "eagle3")),
    }[method]()
    for budget in (CONTEXT * 2, 10):
        engine = tiny.make_engine(
            target(), drafter, 8, max_num_batched_tokens=budget, max_num_seqs=2
        )
        requests = tiny.run(engine, [job, Job([1], tiny.GREEDY)])
        assert requests[0].output_token_ids == expected
        assert requests[0].finish_reason == "length"


def test_max_model_len_ends_requests_before_the_targets_context() -> None:
    job = Job(prompt_of(5), ENDLESS)
    expected = tiny.naive(target(), job, max_model_len=20)
    for k in (1, 4, 16):
        drafter = tiny.oracle([job.prompt + tiny.naive(target(), job, max_model_len=40)])
        engine = tiny.make_engine(target(), drafter, k, max_model_len=20)
        (request,) = tiny.run(engine, [job])
        assert request.output_token_ids == expected
        assert request.num_tokens == 20
        assert request.finish_reason == "length"


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("prompt_length", [1, 18, 20, 21, 40])
def test_a_head_with_fewer_positions_than_the_context_stops_drafting_there(
    method: str, prompt_length: int
) -> None:
    network = tiny.make_head(target(), method, max_position_embeddings=20)
    job = Job(prompt_of(prompt_length), SamplingParams(temperature=0.0, max_tokens=30))
    for budget in (64, 5):
        engine = tiny.make_engine(
            target(),
            tiny.head_drafter(network),
            6,
            max_num_batched_tokens=budget,
            max_num_seqs=1,
        )
        (request,) = tiny.run(engine, [job])
        assert request.output_token_ids == tiny.naive(target(), job)
        # In chunks of 5 the last of 21 tokens comes alone: its drafts need positions up to 19.
        reach = 20 if budget == 64 else 21
        assert (request.stats.num_draft_tokens > 0) == (prompt_length <= reach)


def test_the_head_drafts_up_to_its_very_last_position() -> None:
    network = tiny.make_head(target(), max_position_embeddings=20)
    seen: list[tuple[int, int]] = []

    class Watch(tiny.ScriptedDrafter):
        def __init__(self) -> None:
            self.head = tiny.head_drafter(network)
            self.tap_layers = self.head.tap_layers
            self.cache_layout = self.head.cache_layout
            self.max_positions = self.head.max_positions

        def propose(self, batch):  # type: ignore[no-untyped-def]
            seen.extend((len(s.history), s.num_draft_tokens) for s in batch.sequences)
            return self.head.propose(batch)

    engine = tiny.make_engine(target(), Watch(), 4)
    tiny.run(engine, [Job(prompt_of(10), SamplingParams(temperature=0.0, max_tokens=25))])
    # The last draft is predicted at position history - 2 + drafts - 1, at most 19.
    assert max(history + drafts - 3 for history, drafts in seen) == 19
    assert all(drafts == min(4, 22 - history) for history, drafts in seen)


def test_a_request_beyond_the_heads_reach_keeps_no_taps() -> None:
    network = tiny.make_head(target(), max_position_embeddings=20)
    engine = tiny.make_engine(target(), tiny.head_drafter(network), 4)
    request = engine.add_request("0", prompt_of(40), SamplingParams(max_tokens=40))
    while engine.has_unfinished:
        engine.step()
        assert request.num_pending == 0
