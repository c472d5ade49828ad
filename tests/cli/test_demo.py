"""`peagle demo`: real figures for each method, and exit code 1 where tokens differ."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from peagle.cli import engines
from peagle.cli.demo import PROMPTS
from peagle.config import EngineConfig, SpeculativeConfig

from .fakes import ANSWER, FakeLLM, Shell

P_EAGLE = SimpleNamespace(
    name="smollm2-135m-p-eagle",
    path=Path("/heads/smollm2-135m-p-eagle"),
    method="p-eagle",
    target="smollm2-135m",
    num_speculative_tokens=7,
)


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """The heads that ship: none, until a test adds one."""
    found: list[SimpleNamespace] = []
    monkeypatch.setattr(engines, "shipped_heads", lambda: found)
    return found


def _wrong_when_drafting(
    model: str, config: EngineConfig, drafter: SpeculativeConfig | None
) -> FakeLLM:
    return FakeLLM(model, config, drafter, answer="one twa three" if drafter else ANSWER)


def test_without_heads_plain_and_ngram_are_compared(shell: Shell) -> None:
    assert shell("demo", "--json", "--prompts", "2", "--max-tokens", "9") == 0
    plain, ngram = shell.json["methods"]
    assert (plain["method"], ngram["method"]) == ("plain", "ngram")
    assert plain["num_output_tokens"] == ngram["num_output_tokens"] == 2 * len(ANSWER)
    assert plain["mean_acceptance_length"] is None
    assert ngram["mean_acceptance_length"] == 3.0
    assert shell.json["identical"]
    assert shell.json["provenance"]["versions"]["peagle"]


def test_shipped_heads_of_the_target_join(shell: Shell, shipped: list[SimpleNamespace]) -> None:
    shipped += [P_EAGLE, SimpleNamespace(**(vars(P_EAGLE) | {"name": "x", "target": "other"}))]
    assert shell("demo", "--json", "--prompts", "1") == 0
    assert [m["method"] for m in shell.json["methods"]] == ["plain", "ngram", "p-eagle"]
    assert shell.llm.speculative_config == SpeculativeConfig(model="smollm2-135m-p-eagle")


def test_table_goes_to_stdout_and_to_stderr_beside_json(shell: Shell) -> None:
    assert shell("demo", "--prompts", "1") == 0
    assert "ngram" in shell.out
    assert "yes" in shell.out
    shell("demo", "--prompts", "1", "--json")
    assert len(shell.out.splitlines()) == 1
    assert "speed-up" in shell.err


def test_a_different_token_is_said_where_and_exits_1(shell: Shell) -> None:
    shell.make = _wrong_when_drafting
    assert shell("demo", "--prompts", "2", "--json") == 1
    assert not shell.json["identical"]
    assert [(d["prompt"], d["token"]) for d in shell.json["differences"]] == [(1, 7), (2, 7)]
    assert "ngram: prompt 1, token 7: plain has id 111, ngram has id 97" in shell.err


def test_a_shorter_answer_is_a_difference(shell: Shell) -> None:
    def make(model: str, config: EngineConfig, drafter: SpeculativeConfig | None) -> FakeLLM:
        return FakeLLM(model, config, drafter, answer=ANSWER[:5] if drafter else ANSWER)

    shell.make = make
    assert shell("demo", "--prompts", "1") == 1
    assert "token 6: plain has id 119, ngram has the end" in shell.err


def test_looping_answers_are_left_out_of_the_second_length(shell: Shell) -> None:
    shell.make = partial(FakeLLM, answer="ab" * 40)
    assert shell("demo", "--prompts", "1", "--json") == 0
    ngram = shell.json["methods"][1]
    assert ngram["looping_answers"] == 1
    assert ngram["mean_acceptance_length"] == 3.0
    assert ngram["mean_acceptance_length_without_looping"] is None


@pytest.mark.parametrize("count", ["0", str(len(PROMPTS) + 1)])
def test_number_of_prompts_is_checked(shell: Shell, count: str) -> None:
    assert shell("demo", "--prompts", count) == 2
    assert shell.engines == []


def test_heads_says_that_there_are_none(shell: Shell) -> None:
    assert shell("heads") == 0
    assert "no heads ship" in shell.err
    shell("heads", "--json")
    assert shell.json == []


def test_heads_are_listed(shell: Shell, shipped: list[SimpleNamespace]) -> None:
    shipped.append(P_EAGLE)
    assert shell("heads") == 0
    assert "smollm2-135m-p-eagle" in shell.out
    shell("heads", "--json")
    assert shell.json[0]["num_speculative_tokens"] == 7
