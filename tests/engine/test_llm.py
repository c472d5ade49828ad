"""LLM: text at the edge. Streams, stop strings, cancelling, n answers, and vLLM's shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import peagle.engine.llm
from peagle.engine.llm import LLM
from peagle.errors import ConfigError, PeagleError, RequestError
from peagle.outputs import RequestOutput
from peagle.sampling_params import SamplingParams
from tests.tiny import drafters
from tests.tiny.folders import write_head

TEXT = "abc the €é 😀"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
# Letters, spaces and parts of characters, so that answers are text with strings to stop at.
READABLE = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def readable(plain_llm: LLM) -> SamplingParams:
    tokenizer = plain_llm.get_tokenizer()
    favoured = {t for text in ("abcdef  the", "a €", "é") for t in tokenizer.encode(text)}
    return dataclasses.replace(READABLE, logit_bias=dict.fromkeys(favoured, 12.0))


def use_oracle(llm: LLM, *outputs: RequestOutput) -> None:
    """Whole answers then fall into few steps: stops must be found inside them."""
    known = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
    llm.engine._host_drafter = drafters.oracle(known)


def all_blocks_are_free(llm: LLM) -> bool:
    engine = llm.engine
    return engine.allocator.num_free == engine.allocator.num_blocks and not engine.has_unfinished


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, max_tokens=40)])
def test_speculation_changes_neither_tokens_nor_text(
    plain_llm: LLM, spec_llm: LLM, params: SamplingParams
) -> None:
    prompts = [TEXT, {"prompt": "x"}, {"prompt_token_ids": [3, 4, 5]}]
    plain, spec = plain_llm.generate(prompts, params), spec_llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in spec]
    assert [o.outputs[0].text for o in plain] == [o.outputs[0].text for o in spec]
    assert [o.prompt for o in spec] == [TEXT, "x", None]
    assert all(o.finished for o in spec)
    assert spec_llm.stats.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_streamed_chunks_joined_equal_the_full_text(
    spec_llm: LLM, plain_llm: LLM, skip_special_tokens: bool
) -> None:
    tokenizer = plain_llm.get_tokenizer()
    for seed in range(4):
        params = SamplingParams(
            seed=seed,
            max_tokens=30,
            ignore_eos=True,
            skip_special_tokens=skip_special_tokens,
            logit_bias={tokenizer.eos_token_id: 6.0},
        )
        joined, last = "", None
        for output in spec_llm.stream(TEXT, params):
            text = output.outputs[0].text
            assert text.startswith(joined)
            joined, last = text, output
        assert last is not None
        assert last.finished
        answer = last.outputs[0]
        assert joined == tokenizer.decode(answer.token_ids, skip_special_tokens=skip_special_tokens)
        assert answer.token_ids == plain_llm.generate(TEXT, params)[0].outputs[0].token_ids


def stops_in(text: str) -> list[str]:
    """Strings of one to three characters that stand in the text, spread over it."""
    found = [text[at : at + n] for n in (1, 2, 3) for at in range(4, len(text) - n, 7)]
    return [s for s in found if "\ufffd" not in s]


@pytest.mark.slow
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_answers_where_the_plain_run_ends(
    plain_llm: LLM, scripted_llm: LLM, readable: SamplingParams, include: bool
) -> None:
    (whole,) = plain_llm.generate(TEXT, readable)
    text = whole.outputs[0].text
    assert len(set(stops_in(text))) > 5
    use_oracle(scripted_llm, whole)
    for stop in stops_in(text):
        params = dataclasses.replace(readable, stop=stop, include_stop_str_in_output=include)
        expected = plain_llm.generate(TEXT, params)[0].outputs[0]
        chunks = [o.outputs[0] for o in scripted_llm.stream(TEXT, params)]
        answer = chunks[-1]
        assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        end = text.index(stop)
        assert answer.text == text[: end + len(stop) if include else end]
        assert stop in plain_llm.get_tokenizer().decode(answer.token_ids)
        assert all(stop not in c.text for c in (chunks[:-1] if include else chunks))
        assert all(answer.text.startswith(c.text) for c in chunks)


def test_a_stop_string_inside_one_speculative_step_drops_the_rest_of_it(
    plain_llm: LLM, scripted_llm: LLM, readable: SamplingParams
) -> None:
    (whole,) = plain_llm.generate(TEXT, readable)
    use_oracle(scripted_llm, whole)
    stop = whole.outputs[0].text[3:5]
    before = scripted_llm.stats.num_output_tokens
    (output,) = scripted_llm.generate(TEXT, dataclasses.replace(readable, stop=[stop], logprobs=0))
    answer = output.outputs[0]
    assert answer.finish_reason == "stop"
    assert output.stats.num_steps == 2  # the prefill and one speculative step
    assert output.stats.num_accepted_tokens + 2 > len(answer.token_ids)  # it ended in the middle
    assert output.stats.num_output_tokens == len(answer.token_ids)
    assert scripted_llm.stats.num_output_tokens == before + len(answer.token_ids)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    assert all_blocks_are_free(scripted_llm)


def test_stop_strings_wait_for_min_tokens(
    plain_llm: LLM, scripted_llm: LLM, readable: SamplingParams
) -> None:
    (whole,) = plain_llm.generate(TEXT, readable)
    use_oracle(scripted_llm, whole)
    stop = max(set(whole.outputs[0].text), key=whole.outputs[0].text.count)
    lengths = set()
    for minimum in (0, 5, 12, 25):
        params = dataclasses.replace(readable, stop=[stop], min_tokens=minimum)
        outputs = [llm.generate(TEXT, params)[0].outputs[0] for llm in (plain_llm, scripted_llm)]
        assert outputs[0] == outputs[1]
        assert len(outputs[0].token_ids) > minimum
        lengths.add(len(outputs[0].token_ids))
    assert len(lengths) > 1


def test_a_stop_string_held_back_with_a_broken_character_is_found_when_the_answer_ends(
    plain_llm: LLM, spec_llm: LLM
) -> None:
    """The token " \\xe2" is a space and a third of a character: its text waits for the rest."""
    (token,) = plain_llm.get_tokenizer().convert_tokens_to_ids(["Ġâ"])
    params = SamplingParams(temperature=0.0, logit_bias={token: 100.0}, max_tokens=3, stop=" ")
    for llm in (plain_llm, spec_llm):
        answer = llm.generate("x", params)[0].outputs[0]
        assert answer.token_ids == [token] * 3
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", "stop", " ")
        assert all_blocks_are_free(llm)


def test_a_stop_tokens_text_is_shown_only_if_stops_are_included(
    plain_llm: LLM, spec_llm: LLM, readable: SamplingParams
) -> None:
    (whole,) = plain_llm.generate(TEXT, readable)
    tokens = whole.outputs[0].token_ids
    end = tokens[10]
    cut = tokens[: tokens.index(end) + 1]
    for include in (False, True):
        params = dataclasses.replace(
            readable, stop_token_ids=[end], include_stop_str_in_output=include
        )
        (output,) = spec_llm.generate(TEXT, params)
        answer = output.outputs[0]
        assert answer.token_ids == cut
        assert (answer.finish_reason, answer.stop_reason) == ("stop", end)
        shown = cut if include else cut[:-1]
        assert answer.text == plain_llm.get_tokenizer().decode(shown)


def test_end_of_sequence_ends_the_answer_and_is_not_shown(plain_llm: LLM, spec_llm: LLM) -> None:
    eos = plain_llm.get_tokenizer().eos_token_id
    params = SamplingParams(seed=1, max_tokens=60, logit_bias={eos: 5.0}, skip_special_tokens=False)
    for llm in (plain_llm, spec_llm):
        (output,) = llm.generate(TEXT, params)
        answer = output.outputs[0]
        assert answer.token_ids[-1] == eos
        assert eos not in answer.token_ids[:-1]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        assert "<|end|>" not in answer.text
    held = dataclasses.replace(params, min_tokens=20)
    outputs = [llm.generate(TEXT, held)[0].outputs[0] for llm in (plain_llm, spec_llm)]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].token_ids) > 20


def test_bad_words_are_not_said(plain_llm: LLM, spec_llm: LLM, readable: SamplingParams) -> None:
    text = plain_llm.generate(TEXT, readable)[0].outputs[0].text
    words = [w for w in ("abc", "the", "ab", "d") if w in text]
    assert words
    params = dataclasses.replace(readable, bad_words=words)
    outputs = [llm.generate(TEXT, params)[0].outputs[0] for llm in (plain_llm, spec_llm)]
    assert outputs[0] == outputs[1]
    tokenizer = plain_llm.get_tokenizer()
    for word in words:
        banned = tokenizer.encode(word)
        said = outputs[0].token_ids
        assert all(said[i : i + len(banned)] != banned for i in range(len(said)))


def test_closing_a_stream_frees_its_blocks(spec_llm: LLM) -> None:
    stream = spec_llm.stream(TEXT, GREEDY)
    next(stream)
    assert not all_blocks_are_free(spec_llm)
    close(stream)
    assert all_blocks_are_free(spec_llm)
    assert not spec_llm._active


def test_closing_a_stream_that_was_never_read_leaves_nothing_behind(spec_llm: LLM) -> None:
    close(spec_llm.stream(TEXT, GREEDY))
    del_me = spec_llm.stream(TEXT, GREEDY)
    del del_me
    assert all_blocks_are_free(spec_llm)
    assert not spec_llm._active


def close(stream: Iterator[RequestOutput]) -> None:
    stream.close()  # type: ignore[attr-defined]


def test_a_stream_left_in_a_for_loop_frees_its_blocks(spec_llm: LLM) -> None:
    for _ in spec_llm.stream(TEXT, GREEDY):
        break
    assert all_blocks_are_free(spec_llm)


def test_streams_read_side_by_side_do_not_disturb_each_other(plain_llm: LLM, spec_llm: LLM) -> None:
    prompts = [TEXT, "the", "xyz"]
    expected = [o.outputs[0] for o in plain_llm.generate(prompts, GREEDY)]
    streams = [spec_llm.stream(p, GREEDY) for p in prompts]
    doomed = spec_llm.stream("the", GREEDY)
    last: dict[int, Any] = {}
    next(doomed)
    for turn in range(200):
        if turn == 3:
            close(doomed)
        for n, stream in enumerate(streams):
            for output in stream:
                last[n] = output.outputs[0]
                break
    assert [last[n] for n in range(3)] == expected
    assert all_blocks_are_free(spec_llm)


def test_ctrl_c_inside_generate_frees_all_blocks(
    spec_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = spec_llm.engine.runner.run, []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run(*args)

    before = spec_llm.generate(TEXT, GREEDY)[0].outputs[0]
    monkeypatch.setattr(spec_llm.engine.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spec_llm.generate([TEXT, "a", "b"], GREEDY)
    monkeypatch.undo()
    assert all_blocks_are_free(spec_llm)
    assert not spec_llm._active
    assert spec_llm.generate(TEXT, GREEDY)[0].outputs[0] == before


def test_n_answers_are_distinct_and_the_first_is_the_answer_of_n_1(
    plain_llm: LLM, spec_llm: LLM
) -> None:
    one = SamplingParams(seed=9, max_tokens=12)
    several = dataclasses.replace(one, n=4)
    (output,) = spec_llm.generate(TEXT, several)
    tokens = [a.token_ids for a in output.outputs]
    assert [a.index for a in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(t) for t in tokens}) == 4
    assert tokens[0] == spec_llm.generate(TEXT, one)[0].outputs[0].token_ids
    assert tokens == [a.token_ids for a in plain_llm.generate(TEXT, several)[0].outputs]
    assert output.stats.num_output_tokens == sum(map(len, tokens))


def test_chat_renders_the_template_and_adds_no_token_of_its_own(
    plain_llm: LLM, spec_llm: LLM
) -> None:
    messages = [{"role": "user", "content": "the"}]
    (output,) = spec_llm.chat(messages, GREEDY)
    assert output.prompt == "<|user|>the\n<|assistant|>"
    assert output.prompt_token_ids == plain_llm.get_tokenizer().encode(
        output.prompt, add_special_tokens=False
    )
    assert output.outputs[0] == plain_llm.chat([messages, messages], GREEDY)[1].outputs[0]
    streamed = list(spec_llm.stream(messages, GREEDY))[-1]
    assert streamed.outputs[0] == output.outputs[0]


def test_outputs_come_in_the_order_of_the_prompts_each_with_its_own_params(spec_llm: LLM) -> None:
    prompts = [f"{n} the" for n in range(12)]  # more than run at once
    params = [SamplingParams(temperature=0.0, max_tokens=1 + n % 5) for n in range(12)]
    outputs = spec_llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
    assert len({o.request_id for o in outputs}) == 12
    assert spec_llm.generate([]) == []


def test_metrics_are_in_order(spec_llm: LLM) -> None:
    metrics = spec_llm.generate(TEXT, GREEDY)[0].metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_the_llm_says_what_it_runs(spec_llm: LLM, plain_llm: LLM, model_folder: Any) -> None:
    assert (spec_llm.method, spec_llm.num_speculative_tokens) == ("p-eagle", 5)
    assert (plain_llm.method, plain_llm.num_speculative_tokens) == ("none", 0)
    assert spec_llm.model_path == model_folder


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "the prompt is empty"),
        ({"prompt_token_ids": []}, {}, "the prompt is empty"),
        ("x" * 160, {}, "the prompt has 160 tokens, the context 160"),
        ({"prompt_token_ids": [1, 262]}, {}, "token id 262 is not in the vocabulary of 262"),
        ({"prompt_token_ids": [-1]}, {}, "token id -1 is not in the vocabulary"),
        ("a", {"logit_bias": {262: 1.0}}, "token id 262 is not in the vocabulary"),
        ("a", {"stop_token_ids": [262]}, "token id 262 is not in the vocabulary"),
        ("a", {"num_speculative_tokens": 7}, "num_speculative_tokens=7 is more than"),
        ({"text": "a"}, {}, "neither text nor token ids"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_before_any_work(
    spec_llm: LLM, prompt: Any, params: dict[str, Any], message: str
) -> None:
    steps = spec_llm.stats.num_steps
    with pytest.raises(RequestError, match=message):
        spec_llm.generate(["fine", prompt], SamplingParams(**params))
    with pytest.raises(RequestError, match=message):
        spec_llm.stream(prompt, SamplingParams(**params))
    assert spec_llm.stats.num_steps == steps
    assert all_blocks_are_free(spec_llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_modle_len": 5}, "did you mean 'max_model_len'"),
        ({"max_model_len": 161}, "exceeds the target's context of 160"),
        ({"max_model_len": 1}, "leaves no room"),
        ({"block_size": 0}, "block_size=0 is out of range"),
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes=1000 is too little"),
        ({"dtype": "float8"}, "dtype='float8' is unknown"),
        ({"device": "abacus"}, "device='abacus' is unknown"),
        ({"speculative_config": {"num_speculative_tokens": 0}}, "num_speculative_tokens=0"),
        ({"speculative_config": {"num_speculative_token": 3}}, "did you mean 'num_spec"),
        ({"speculative_config": {"method": "p-eagle"}}, "needs a head"),
        ({"speculative_config": {"model": "HEAD", "num_speculative_tokens": 7}}, "use at most 6"),
        ({"speculative_config": {"model": "HEAD", "method": "eagle3"}}, "is a head for p-eagle"),
        ({"speculative_config": {"model": "nowhere"}}, "no head 'nowhere'"),
    ],
)
def test_bad_options_are_named(
    model_folder: Any, head_folder: Any, options: dict[str, Any], message: str
) -> None:
    drafter = options.get("speculative_config", {})
    if drafter.get("model") == "HEAD":
        options = {"speculative_config": {**drafter, "model": str(head_folder)}}
    with pytest.raises(PeagleError, match=message):
        LLM(str(model_folder), **{"device": "cpu"} | options)


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        ({"model": "HEAD", "num_draft_nodes": 9, "num_speculative_tokens": 1}, {}, "at most 8"),
        ({"model": "HEAD", "num_draft_nodes": 9, "num_speculative_tokens": 7}, {}, "at most 6"),
        ({"model": "EAGLE3", "num_draft_nodes": 9, "num_speculative_tokens": 9}, {}, "at most 8"),
        ({"method": "ngram", "num_draft_nodes": 9, "num_speculative_tokens": 1}, {}, "at most 8"),
        (
            {"model": "HEAD", "num_draft_nodes": 9, "verification": "rejection"},
            {},
            "rejection verifies chains",
        ),
        ({"method": "ngram", "num_draft_nodes": 9}, {"batch_invariant": True}, "with trees"),
    ],
)
def test_trees_that_cannot_be_are_refused_before_the_target_is_loaded(
    model_folder: Path,
    head_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drafter: dict[str, Any],
    options: dict[str, Any],
    message: str,
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the target is loaded")

    monkeypatch.setattr(peagle.engine.llm, "load_engine_target", load)
    heads = {"HEAD": lambda: head_folder, "EAGLE3": lambda: eagle3_head(tmp_path, model_folder)}
    if "model" in drafter:
        drafter = drafter | {"model": str(heads[drafter["model"]]())}
    with pytest.raises(PeagleError, match=message):
        LLM(str(model_folder), device="cpu", speculative_config=drafter, **options)


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        ({"num_draft_nodes": 9}, (5, 9, False)),
        ({"speculation": "auto"}, (6, None, True)),  # as deep as it was trained
        ({"speculation": "auto", "num_draft_nodes": 9}, (7, 9, True)),
        ({"speculation": "auto", "num_draft_nodes": 9, "num_speculative_tokens": 3}, (3, 9, True)),
        ({}, (5, None, False)),
    ],
)
def test_an_eagle3_head_drafts_trees_where_nodes_are_asked_for(
    model_folder: Path, tmp_path: Path, drafter: dict[str, Any], expected: tuple[object, ...]
) -> None:
    config = drafter | {"model": str(eagle3_head(tmp_path, model_folder))}
    llm = LLM(str(model_folder), device="cpu", dtype="float32", speculative_config=config)
    speculation = llm.engine.speculation
    assert speculation is not None
    found = speculation.num_speculative_tokens, speculation.num_draft_nodes, speculation.is_auto
    assert found == expected
    plain = LLM(str(model_folder), device="cpu", dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    texts = ["once upon", "a time"]
    ours, theirs = (engine.generate(texts, params, use_tqdm=False) for engine in (llm, plain))
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in theirs]


def eagle3_head(parent: Path, model_folder: Path) -> Path:
    sizes = {"max_speculative_tokens": 6, "aux_hidden_state_layer_ids": (0, 1, 2)}
    return write_head(parent / "eagle3", model_folder, "eagle3", num_speculative_tokens=5, **sizes)


def test_a_number_of_sampling_params_that_does_not_fit_is_refused(spec_llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts but 1 sampling params"):
        spec_llm.generate(["a", "b"], [GREEDY])


def test_messages_that_the_template_refuses_are_one_request_error(plain_llm: LLM) -> None:
    template = "{{ raise_exception('only users here') }}"
    with pytest.raises(RequestError, match="only users here"):
        plain_llm.chat([{"role": "user", "content": "x"}], chat_template=template)


def test_a_model_without_a_chat_template_says_so(
    plain_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_llm.get_tokenizer(), "chat_template", None)
    with pytest.raises(RequestError, match="no chat template"):
        plain_llm.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is more than max_tokens=4"),
        ({"temperature": 0.0, "n": 2}, "n=2 with temperature=0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1e39}, "temperature=1e"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_p": 1e-300}, "top_p=1e-300"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty=1e-30"),
        ({"presence_penalty": 3.0}, "presence_penalty=3.0"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"n": 0}, "n=0"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
        ({"stop": ""}, "stop contains an empty string"),
        ({"stop": ["a", ""]}, "stop contains an empty string"),
        ({"bad_words": [" "]}, "bad_words contains an empty word"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias key -1"),
        ({"logit_bias": {1: 101.0}}, "logit_bias of token 1"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias of token 1"),
    ],
)
def test_contradictory_sampling_params_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


def test_a_start_is_logged(model_folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="peagle"):
        LLM(str(model_folder), device="cpu", dtype="float32", max_num_seqs=3)
    assert f"{model_folder}: torch.float32 on cpu in " in caplog.text
    assert "drafter: none" in caplog.text
    assert "blocks of 16 tokens" in caplog.text
    assert "max_num_seqs=3" in caplog.text


def test_config_errors_are_user_errors() -> None:
    assert issubclass(ConfigError, PeagleError)
    assert issubclass(RequestError, ValueError)  # what vLLM would have raised


def test_generate_and_chat_take_vllms_arguments(plain_llm: LLM) -> None:
    messages = [{"role": "user", "content": "abc"}]
    expected = plain_llm.chat(messages, GREEDY)[0].outputs[0].token_ids
    said = plain_llm.chat(messages, GREEDY, False, lora_request=None, mm_processor_kwargs=None)
    assert said[0].outputs[0].token_ids == expected
    plain_llm.generate("abc", GREEDY, use_tqdm=False, priority=[0])
    with pytest.raises(RequestError, match="in their order"):
        plain_llm.generate("abc", GREEDY, priority=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_tqmd'"):
        plain_llm.generate("abc", GREEDY, use_tqmd=False)


def test_text_parts_of_a_message_are_its_lines(plain_llm: LLM) -> None:
    parts = [{"type": "text", "text": "a"}, "b"]
    joined = plain_llm.render_chat([{"role": "user", "content": "a\nb"}])
    assert plain_llm.render_chat([{"role": "user", "content": parts}]) == joined
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(RequestError, match="only text can be read"):
        plain_llm.chat([{"role": "user", "content": image}], GREEDY)


def test_a_template_that_wants_parts_gets_them(plain_llm: LLM) -> None:
    template = (
        "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (result,) = plain_llm.chat(
        [{"role": "user", "content": content}],
        GREEDY,
        chat_template=template,
        chat_template_content_format="openai",
    )
    assert result.prompt == "[a][b]"


def test_a_template_sees_tools_and_may_leave_out_the_generation_prompt(plain_llm: LLM) -> None:
    template = "{{ tools }}{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}"
    messages = [{"role": "user", "content": "abc"}]
    (result,) = plain_llm.chat(messages, GREEDY, chat_template=template)
    assert result.prompt == "Noneabc:"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    (result,) = plain_llm.chat(
        messages, GREEDY, chat_template=template, tools=[tool], add_generation_prompt=False
    )
    assert result.prompt == f"{[tool]}abc"


def test_metrics_have_vllms_names_and_count_what_the_stats_count(
    plain_llm: LLM, spec_llm: LLM
) -> None:
    spec_llm.generate(TEXT, GREEDY)
    metrics = {metric.name: metric for metric in spec_llm.get_metrics()}
    stats, prefix = spec_llm.stats, "vllm:spec_decode_num"
    assert stats.num_drafts > 0
    assert metrics[f"{prefix}_drafts"].value == stats.num_drafts
    assert metrics[f"{prefix}_draft_tokens"].value == stats.num_draft_tokens
    assert metrics[f"{prefix}_accepted_tokens"].value == stats.num_accepted_tokens
    per_pos = metrics[f"{prefix}_accepted_tokens_per_pos"].values
    assert sum(per_pos) == stats.num_accepted_tokens
    assert len(per_pos) >= spec_llm.num_speculative_tokens
    assert metrics["vllm:generation_tokens"].value == stats.num_output_tokens
    assert metrics["vllm:prompt_tokens"].value > 0
    assert metrics["vllm:num_requests_running"].value == 0
    assert not any("spec_decode" in metric.name for metric in plain_llm.get_metrics())
