"""A head in the layout of the released ones loads in both engines and means the same in both."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from peagle import SamplingParams
from peagle.backends.vllm.backend import VllmBackend
from peagle.config import EngineConfig
from peagle.errors import RequestError
from tests.tolerance import rounding
from tests.vllm.interop import Outcome, embedded, vllm
from tests.vllm.released_head import CONTEXT, TARGET_LAYERS, write_released_head, write_target

pytestmark = pytest.mark.vllm

K = 5
TINY = EngineConfig(dtype="float32", max_model_len=CONTEXT, max_num_seqs=8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def head(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_released_head(tmp_path_factory.mktemp("head") / "released", Path(target)))


@pytest.fixture(scope="module")
def backend(target: str, head: str) -> Iterator[VllmBackend]:
    with vllm(target, head, K, TINY) as opened:
        yield opened


def prompts(vocab_size: int, count: int = 12) -> list[dict[str, list[int]]]:
    rng = random.Random(0)
    lengths = [rng.randint(1, 40) for _ in range(count)]
    return [
        {"prompt_token_ids": [rng.randrange(vocab_size - 1) for _ in range(n)]} for n in lengths
    ]


def test_both_engines_give_the_same_tokens_and_the_same_counts(
    backend: VllmBackend, target: str, head: str
) -> None:
    llm = embedded(target, head, K, TINY)
    given = prompts(llm.engine.target.config.vocab_size)
    ours = Outcome(llm.generate(given, GREEDY), llm.stats)
    theirs = backend.generate(given, GREEDY)
    for mine, other in zip(ours.outputs, theirs, strict=True):
        assert other.outputs[0].token_ids == mine.outputs[0].token_ids
        assert other.stats.num_drafts == mine.stats.num_drafts
        assert other.stats.num_accepted_tokens_per_pos == mine.stats.num_accepted_tokens_per_pos
    kept = ours.stats.acceptance_rate
    assert 0.02 < kept < 0.98, "a head that is always right or always wrong proves nothing"


def test_a_stream_grows_to_what_generate_returns(backend: VllmBackend) -> None:
    prompt = prompts(200)[0]
    chunks = list(backend.stream(prompt, GREEDY))
    (whole,) = backend.generate(prompt, GREEDY)
    lengths = [len(chunk.outputs[0].token_ids) for chunk in chunks]
    assert lengths == sorted(set(lengths))
    assert chunks[-1].outputs[0].token_ids == whole.outputs[0].token_ids
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].stats.as_dict() == whole.stats.as_dict()


def test_streams_may_be_read_side_by_side_and_given_up(backend: VllmBackend) -> None:
    first, second = (backend.stream(prompt, GREEDY) for prompt in prompts(200)[:2])
    next(first)
    next(second)
    first.close()
    *_, last = second
    (whole,) = backend.generate(prompts(200)[1], GREEDY)
    assert last.outputs[0].token_ids == whole.outputs[0].token_ids
    assert not backend._engine.has_unfinished_requests()


def test_logprobs_are_the_embedded_engines(backend: VllmBackend, target: str, head: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    prompt = prompts(200)[0]
    (theirs,), (ours,) = (
        engine.generate(prompt, params) for engine in (backend, embedded(target, head, K, TINY))
    )
    assert theirs.outputs[0].logprobs is not None
    assert ours.outputs[0].logprobs is not None
    close = rounding(terms=96, depth=TARGET_LAYERS + 1)
    for mine, other in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
        assert mine.keys() == other.keys()
        for token, entry in mine.items():
            assert other[token].logprob == pytest.approx(entry.logprob, abs=close)
            assert other[token].rank == entry.rank


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (SamplingParams(min_p=0.1), "min_p"),
        (SamplingParams(logit_bias={3: 1.0}), "logit_bias"),
        (SamplingParams(num_speculative_tokens=2), "num_speculative_tokens=2"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(
    backend: VllmBackend, params: SamplingParams, named: str
) -> None:
    with pytest.raises(RequestError, match=named):
        backend.generate("abc", params)


def test_sampled_requests_are_refused_where_vllm_would_judge_them_by_chance(
    backend: VllmBackend,
) -> None:
    # Remove this test and the refusal when a CPU build of vLLM spreads the temperature for real.
    with pytest.raises(RequestError, match=r"temperature=0\.8"):
        backend.generate("abc", SamplingParams(temperature=0.8))


def test_penalties_and_bans_reach_drafted_tokens(
    backend: VllmBackend, target: str, head: str
) -> None:
    llm = embedded(target, head, K, TINY)
    given = prompts(200, 4)
    plain = [output.outputs[0].token_ids[:24] for output in backend.generate(given, GREEDY)]
    words = {llm.get_tokenizer().decode(token) for answer in plain for token in answer}
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        bad_words=sorted(word for word in words if word.isascii() and word.isalnum()),
        min_tokens=24,
        max_tokens=24,
        num_speculative_tokens=K,
    )
    assert params.bad_words
    theirs = [output.outputs[0].token_ids for output in backend.generate(given, params)]
    assert theirs == [output.outputs[0].token_ids for output in llm.generate(given, params)]
    assert theirs != plain


def test_a_prompt_longer_than_the_context_is_refused(backend: VllmBackend) -> None:
    with pytest.raises(RequestError, match=f"the context {CONTEXT}"):
        backend.generate({"prompt_token_ids": [1] * CONTEXT}, GREEDY)


def test_an_answer_ends_where_the_context_does(
    backend: VllmBackend, target: str, head: str
) -> None:
    prompt = {"prompt_token_ids": [7] * (CONTEXT - 10)}
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (theirs,), (ours,) = (
        engine.generate(prompt, params) for engine in (backend, embedded(target, head, K, TINY))
    )
    assert theirs.outputs[0].token_ids == ours.outputs[0].token_ids
    assert theirs.outputs[0].finish_reason == ours.outputs[0].finish_reason == "length"
