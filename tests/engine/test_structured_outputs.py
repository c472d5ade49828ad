"""Structured outputs: the answer is that of masked decoding without drafts, and follows its
grammar."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from peagle.engine.grammar import Grammar, GrammarCompiler
from peagle.engine.llm import LLM
from peagle.engine.request import Request
from peagle.errors import RequestError
from peagle.models.drafter import Drafter, SequenceDraft
from peagle.models.eagle import EagleNetwork
from peagle.models.ngram import NgramDrafter
from peagle.models.target import TargetModel
from peagle.sampling_params import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    SamplingParams,
    StructuredOutputsParams,
)
from peagle.speculation.trees import pruned
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.folders import byte_tokenizer
from tests.tiny.jobs import Job, grammar_of, grammars
from tests.tiny.models import SHALLOW, head_drafter

TOKENIZER = byte_tokenizer()
EOS = (TOKENIZER.eos_token_id,)
CONTEXT = 224
PAIR = {
    "type": "object",
    "properties": {"abc": {"type": "integer"}, "the": {"enum": ["ab", "abc", True]}},
    "required": ["abc", "the"],
    "additionalProperties": False,
}
SHAPES = [
    StructuredOutputsParams(json=PAIR),
    StructuredOutputsParams(json=json.dumps(PAIR), disable_any_whitespace=True),
    StructuredOutputsParams(regex=r"(ab|the){2,7}c?\d"),
    StructuredOutputsParams(choice=["the cab", "the abc", "a"]),
    StructuredOutputsParams(grammar='root ::= "ab" root "c" | [0-9]'),
    StructuredOutputsParams(grammar='start: "the" NUMBER+\nNUMBER: /[1-3]{2}/'),
    StructuredOutputsParams(json_object=True, whitespace_pattern=" "),
]


@cache
def target() -> TargetModel:
    return SHALLOW.make_target(vocab_size=len(TOKENIZER), max_position_embeddings=CONTEXT)


@cache
def network(method: str) -> EagleNetwork:
    return SHALLOW.make_head(target(), method)


def greedy(wanted: StructuredOutputsParams | None, max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, structured_outputs=wanted)


def sampled(
    wanted: StructuredOutputsParams | None, seed: int = 1, max_tokens: int = 40
) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, structured_outputs=wanted)


def text(request: Request) -> str:
    return str(TOKENIZER.decode(request.output_token_ids, skip_special_tokens=True))


def jobs_of(params: Sequence[SamplingParams]) -> list[Job]:
    rng = random.Random(3)
    return [
        Job([rng.randrange(1, 200) for _ in range(n % 5 + 1)], p, joins=n // 3, eos=EOS)
        for n, p in enumerate(params)
    ]


def validate(answer: Any, schema: dict[str, Any]) -> None:
    import jsonschema  # a GPU's machine, where this file is imported, may not have it

    jsonschema.validate(answer, schema)


DRAFTERS = ("plain", "scripted", "n-gram", "p-eagle tree", "eagle3", "eagle3 tree", "n-gram tree")


def drafter_named(name: str, known: list[list[int]]) -> tuple[Drafter | None, dict[str, Any]]:
    if name == "plain":
        return None, {}
    if name == "scripted":
        return drafters.mixed(known), {}
    options = {"nodes": 14} if name.endswith("tree") else {}
    if name.startswith("n-gram"):
        return NgramDrafter(1, 3), options
    return head_drafter(network(name.removesuffix(" tree"))), options


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("name", DRAFTERS)
def test_answers_are_those_of_masked_decoding_without_drafts(name: str, static: bool) -> None:
    """Beside requests without a grammar, and some whose blocks are taken from them."""
    params = [f(shape) for shape in SHAPES for f in (greedy, sampled)]
    params[3] = dataclasses.replace(params[3], top_k=3, logprobs=1, presence_penalty=0.5)
    # A request is admitted with room for the rows of its beam: it outgrows that only later.
    longest, room = (60, 190) if name == "eagle3 tree" else (20, 116)
    jobs = jobs_of([*params, greedy(None, longest), sampled(None, max_tokens=longest)])
    known = naive.known(target(), jobs)
    drafter, options = drafter_named(name, known)
    options |= engines.room_for(room, target(), drafter) | {"block_size": 2, "max_model_len": 90}
    engine = engines.make_engine(target(), drafter, 4, eos=EOS, static=static, **options)
    requests = engines.run(engine, jobs)
    naive.check(target(), requests, jobs)
    assert sum(r.num_preemptions for r in requests) > 0
    if name == "scripted":
        assert engine.stats.num_accepted_tokens > 20


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Of a kind whose answers end, if rarely soon."""
    kinds = ["integer", "boolean", "enum", "text", "number", "null"]
    kind = rng.choice(kinds + ["object", "array", "any of"] * depth)
    if kind == "enum":
        return {"enum": rng.sample(["ab", "the", 'a"b', 3, None, True, "é"], rng.randint(1, 4))}
    if kind == "text":
        return {"type": "string", "maxLength": rng.randint(0, 4), **rng.choice(TEXTS)}
    if kind in ("integer", "number"):
        return {"type": kind, "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 500)}
    if kind == "array":
        limits = {"minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 4)}
        return {"type": "array", "items": random_schema(rng, depth - 1)} | limits
    if kind == "any of":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "object":
        names = rng.sample(["a", "abc", "the", "the c", "ü"], rng.randint(0, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    return {"type": kind}


TEXTS: list[dict[str, Any]] = [{}, {"minLength": 0}, {"pattern": "^[abc]{0,3}$"}]


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 200])
def test_answers_parse_and_follow_random_schemas_with_every_drafter(count: int) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(count)]
    params = []
    for seed, schema in enumerate(schemas):
        own = StructuredOutputsParams(json=schema, disable_any_whitespace=seed % 3 > 0)
        params.append(sampled(own, seed, 60) if seed % 2 else greedy(own, 60))
    jobs = jobs_of(params)
    plain: list[Request] = []
    for n, name in enumerate(name for name in DRAFTERS if name != "scripted"):
        drafter, options = drafter_named(name, [])
        options |= {"static": n % 2 > 0, "max_num_seqs": 50}
        engine = engines.make_engine(target(), drafter, 4, eos=EOS, **options)
        requests = engines.run(engine, jobs)
        plain = plain or requests
        assert engines.answers_of(requests) == engines.answers_of(plain)
        assert engines.endings(requests) == engines.endings(plain)
    ended = [n for n, request in enumerate(plain) if request.finish_reason == "stop"]
    assert len(ended) > 0.7 * count
    assert {r.finish_reason for r in plain} <= {"stop", "length"}
    for n in ended:
        validate(json.loads(text(plain[n])), schemas[n])


def test_each_kind_of_constraint_holds() -> None:
    params = [sampled(SHAPES[n], seed) for n in (2, 3, 4, 5) for seed in range(4)]
    requests = engines.run(engines.make_engine(target(), eos=EOS), jobs_of(params))
    patterns = [
        r"(ab|the){2,7}c?\d",
        "the cab|the abc|a",
        r"(ab)*\dc*",
        r"the([1-3]{2})+",
    ]
    for n, request in enumerate(requests):
        if request.finish_reason == "stop":
            assert re.fullmatch(patterns[n // 4], text(request))
    assert sum(r.finish_reason == "stop" for r in requests) > 8


def test_an_answer_that_is_cut_is_marked_length() -> None:
    wanted = StructuredOutputsParams(regex="a{9}")
    jobs = jobs_of([greedy(wanted, 3), greedy(wanted, 10)])
    cut, whole = engines.run(engines.make_engine(target(), eos=EOS), jobs)
    assert (text(cut), cut.finish_reason) == ("aaa", "length")
    assert (text(whole), whole.finish_reason) == ("aaaaaaaaa", "stop")
    assert whole.output_token_ids[-1] == EOS[0]


@pytest.mark.parametrize("max_tokens", [4, 20])
def test_a_minimum_length_does_not_stand_against_a_complete_grammar(max_tokens: int) -> None:
    wanted = StructuredOutputsParams(regex="a{2,6}")
    params = dataclasses.replace(greedy(wanted, max_tokens), min_tokens=min(20, max_tokens))
    (request,) = engines.run(engines.make_engine(target(), eos=EOS), jobs_of([params]))
    assert text(request) == "a" * min(6, max_tokens)
    assert request.finish_reason == ("stop" if max_tokens > 6 else "length")


def ids(words: str) -> list[int]:
    return list(TOKENIZER.encode(words))


@both_forms
def test_forbidden_drafts_cost_no_row(static: bool) -> None:
    """The script drafts one right token, then one that the grammar forbids, and more."""
    wanted = StructuredOutputsParams(regex="a{30}")
    (a,), (b,) = ids("a"), ids("b")
    drafter = drafters.ScriptedDrafter(lambda history, k: [a, b, a, a][:k])
    engine = engines.make_engine(target(), drafter, 4, eos=EOS, static=static)
    (request,) = engines.run(engine, jobs_of([greedy(wanted)]))
    assert text(request) == "a" * 30
    stats = request.stats
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 10


def test_of_a_tree_the_permitted_nodes_are_left() -> None:
    a, b, c = (ids(letter)[0] for letter in "abc")
    grammar = grammar_of(greedy(StructuredOutputsParams(regex="a(b|c)a|cab")))
    assert grammar is not None
    tokens, parents = [b, a, c, a, b, c, a, EOS[0]], [0, 0, 0, 1, 2, 2, 6, 7]
    kept = grammar.permitted(tokens, parents)
    assert kept == [1, 2, 4, 5, 6]  # a, c, ab, ac, aca; its end is sampled without a row
    assert pruned(tokens, parents, kept) == ([a, c, b, c, a], [0, 0, 1, 1, 4])
    assert pruned(tokens, parents, []) == ([], [])
    grammar = grammar_of(greedy(StructuredOutputsParams(regex="a{1,3}")))
    assert grammar is not None
    assert grammar.permitted([a, EOS[0], a], [0, 1, 1]) == [0, 2]


def test_masks_do_not_depend_on_the_drafts_that_were_asked_about_before() -> None:
    wanted = greedy(StructuredOutputsParams(json=PAIR))
    answer = ids('{"abc": 12, "the": "ab"}')
    asked, fresh = grammar_of(wanted), grammar_of(wanted)
    assert asked is not None
    assert fresh is not None
    rng = random.Random(0)
    for n, token in enumerate(answer):
        paths = [[*answer[n : n + rng.randint(0, 4)], rng.choice(answer)] for _ in range(5)]
        asked.masks(paths)
        asked.permitted(answer[n : n + 3], range(len(answer[n : n + 3])))
        assert asked.masks([[]]).equal(fresh.masks([[]]))
        asked.accept(token)
        fresh.accept(token)
    assert asked.masks([[]]).equal(fresh.masks([[]]))


def test_by_rejection_a_forbidden_draft_is_refused_and_not_cut() -> None:
    """It drafts a or something forbidden, evenly. Were the latter cut, what follows would be drawn
    from the whole distribution instead of what a left of it: a would come in 3 of 4 answers."""
    (a,), (b,), (c,) = ids("a"), ids("b"), ids("c")
    rng = random.Random(5)

    class HalfForbidden(drafters.ScriptedDrafter):
        def propose(
            self, histories: Sequence[Sequence[int]], counts: Sequence[int]
        ) -> list[SequenceDraft]:
            probs = torch.zeros(1, len(TOKENIZER), dtype=torch.float64)
            probs[0, [a, c]] = 0.5
            return [
                SequenceDraft([rng.choice((a, c))], probs) if k else SequenceDraft([])
                for k in counts
            ]

    drafter = HalfForbidden(lambda history, k: [])
    engine = engines.make_engine(target(), drafter, 1, "rejection", eos=EOS, max_num_seqs=64)
    wanted = StructuredOutputsParams(regex="c[ab]c")
    params = SamplingParams(temperature=500.0, max_tokens=3, structured_outputs=wanted)
    requests = engines.run(engine, [Job([7], params) for _ in range(400)])
    seconds = [r.output_token_ids[1] for r in requests]
    assert set(seconds) == {a, b}
    assert abs(seconds.count(a) - 200) < 50


BAD = {
    "unclosed group": {"regex": "(ab"},
    "look-ahead": {"regex": "a(?=b)"},
    "unknown name": {"grammar": "start: foo"},
    "Invalid type": {"json": {"type": "objct"}},
    "Unimplemented keys": {"json": {"not": {"type": "string"}}},
    "Unsatisfiable": {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "cannot be compiled": {"grammar": "root ::= ("},
    "all multipleOf": {"json": {"type": "integer", "multipleOf": 999983}},
    "multiple of all": {
        "json": {"allOf": [{"type": "number", "multipleOf": n} for n in (9973, 99.67)]}
    },
    "common multiple": {"grammar": 'start: %json {"multiple\\u004ff" : 999983}'},
}


@pytest.mark.parametrize("message", BAD)
def test_what_makes_no_grammar_is_one_line_when_it_is_asked_for(
    message: str, plain_llm: LLM
) -> None:
    params = greedy(StructuredOutputsParams(**BAD[message]))
    with pytest.raises(RequestError, match=message) as raised:
        plain_llm.generate("abc", params)
    assert "\n" not in str(raised.value)
    assert not plain_llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "but has none"),
        ({"regex": "a", "json_object": True}, "regex and json_object"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[]"}, "not a JSON schema"),
        ({"json": {"a": object()}}, "not valid JSON"),
        ({"choice": "yes"}, "not a list of texts"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "texts"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "characters"),
        ({"regex": 3}, "regex is not a text"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize("divisor", [0.01, 7000000, 0.05, 86400])
def test_common_divisors_are_permitted(divisor: float, plain_llm: LLM) -> None:
    wanted = StructuredOutputsParams(json={"type": "number", "multipleOf": divisor})
    [result] = plain_llm.generate("abc", greedy(wanted, max_tokens=2))
    assert result.outputs[0].token_ids


def test_a_list_may_be_as_long_as_it_is_said_to_be() -> None:
    compiler = GrammarCompiler(TOKENIZER, len(TOKENIZER), frozenset(EOS))
    texts = ["a", 'a "b"', "é😀", "a\\n\n", *(f"v{n}" for n in range(MAX_CHOICES - 4))]
    for wanted in texts[:6]:
        grammar = compiler.compile(StructuredOutputsParams(choice=texts))
        for token in TOKENIZER.encode(wanted):
            assert is_permitted(grammar, token)
            grammar.accept(token)
        assert is_permitted(grammar, *EOS)
        assert grammar.error is None


def is_permitted(grammar: Grammar, token: int) -> bool:
    (bits,) = grammar.masks([()])
    return bool(bits[token // 32] >> (token % 32) & 1)


def test_a_grammar_and_ignore_eos_contradict_each_other() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(structured_outputs=SHAPES[0], ignore_eos=True)


def test_a_grammar_is_compiled_once_and_answers_do_not_share_it() -> None:
    before = grammars()._compiled.cache_info().misses
    wanted = StructuredOutputsParams(regex="[xyz]{3}")
    first, second = (grammar_of(greedy(wanted)) for _ in range(2))
    assert grammars()._compiled.cache_info().misses == before + 1
    assert isinstance(first, Grammar)
    assert isinstance(second, Grammar)
    first.accept(ids("x")[0])
    assert second.permitted(ids("xyz"), [0, 1, 2]) == [0, 1, 2]
    assert first.permitted(ids("xyz"), [0, 1, 2]) == [0, 1]


@pytest.mark.parametrize(
    ("tokenizer", "eos", "lacks"),
    [(TOKENIZER, (), "end-of-sequence token"), (object(), EOS, "fast tokenizer")],
)
def test_a_model_that_cannot_have_grammars_says_why(
    tokenizer: Any, eos: tuple[int, ...], lacks: str
) -> None:
    compiler = GrammarCompiler(tokenizer, len(TOKENIZER), frozenset(eos))
    with pytest.raises(RequestError, match=lacks):
        compiler.compile(SHAPES[0])


def test_a_matcher_that_gives_up_fails_its_request_and_no_other() -> None:
    """It would permit the end of the sequence, as if the answer were complete."""
    wanted = greedy(StructuredOutputsParams(regex="a{5}"))
    broken = grammar_of(wanted)
    assert broken is not None
    broken._matcher.consume_token(ids("b")[0])
    engine = engines.make_engine(target(), eos=EOS)
    bad = engine.add_request("bad", [3], wanted, grammar=broken)
    good = engine.add_request("good", [3], wanted, grammar=grammar_of(wanted))
    while engine.has_unfinished:
        engine.step()
    assert bad.finish_reason == "error"
    assert "doesn't satisfy the grammar" in (bad.error or "")
    assert text(good) == "aaaaa"


def test_the_llm_answers_in_json(spec_llm: LLM) -> None:
    params = SamplingParams(
        seed=2,
        n=2,
        max_tokens=80,
        structured_outputs=StructuredOutputsParams(json=PAIR, disable_any_whitespace=True),
    )
    for answer in spec_llm.generate("abc", params)[0].outputs:
        assert answer.finish_reason == "stop"
        validate(json.loads(answer.text), PAIR)
