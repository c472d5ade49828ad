"""`peagle demo`: real figures for each method, and exit code 1 where tokens differ."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peagle.cli import engines
from peagle.cli.demo import PROMPTS, Contender, Repeat, _gains, table_row
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.speculation.statistics import SpecDecodeStats

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
    assert shell.json["num_repeats"] == len(plain["tokens_per_second_of_repeats"]) == 3
    assert plain["tokens_per_second"] == sorted(plain["tokens_per_second_of_repeats"])[1]
    assert plain["speedup"] == 1.0
    low, high = ngram["speedup_interval"]
    assert low <= ngram["speedup"] <= high
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


@pytest.mark.parametrize("given", [("--prompts", "0"), ("--prompts", str(len(PROMPTS) + 1)),
                                   ("--repeats", "0")])  # fmt: skip
def test_numbers_of_prompts_and_repeats_are_checked(shell: Shell, given: tuple[str, str]) -> None:
    assert shell("demo", *given) == 2
    assert shell.engines == []


def test_methods_take_turns_and_each_answers_every_prompt_in_every_repeat(shell: Shell) -> None:
    order = list[str]()

    class Noted(FakeLLM):
        def chat(self, *arguments: Any) -> Any:
            order.append("ngram" if self.speculative_config else "plain")
            return super().chat(*arguments)

    shell.make = Noted
    assert shell("demo", "--prompts", "2", "--repeats", "3") == 0
    timed = order[2:]  # each was warmed up once
    assert timed == ["plain", "ngram", "ngram", "plain"] * 1 + ["ngram", "plain"] + [
        "plain", "ngram", "plain", "ngram", "ngram", "plain",
    ]  # fmt: skip
    assert "repeat 3 of 3: tokens/s plain" in shell.err
    assert not any(llm.config.enable_prefix_caching for llm in shell.engines), "prompts come again"


def contender(name: str, speeds: Sequence[float]) -> Contender:
    repeats = [Repeat([[1] * 64], [64 / speed], [SpecDecodeStats()]) for speed in speeds]
    return Contender(name, cast("Any", None), None if name == "plain" else 5, repeats=repeats)


def test_a_stall_of_one_repeat_neither_makes_a_speed_up_nor_hides_one() -> None:
    plain, ngram = contender("plain", (36.9, 1.1, 37.0)), contender("ngram", (39.8, 41.9, 40.1))
    gain = _gains([plain, ngram])["ngram"]
    assert gain.value == pytest.approx(40.1 / 37.0)
    assert gain.low is not None
    assert gain.low < 1
    row = table_row(ngram, gain, plain)
    assert row[2] == "40 ± 4"
    assert table_row(plain, gain, plain)[2] == "37 (1 to 37)"


@pytest.mark.parametrize("others", [0.84, 0.02, None])
def test_a_busy_machine_is_said(
    shell: Shell, others: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Meter:
        def __enter__(self) -> Meter:
            return self

        def __exit__(self, *_: object) -> None:
            self.others = others

    monkeypatch.setattr("peagle.bench.run.meters.CpuMeter", Meter)
    assert shell("demo", "--prompts", "1", "--json") == 0
    assert shell.json["other_cpu_share"] == others
    assert ("busy: others took 84% of the CPU time" in shell.err) == (others == 0.84)


def test_heads_says_that_there_are_none(shell: Shell) -> None:
    assert shell("heads") == 0
    assert "no heads ship" in shell.err
    shell("heads", "--json")
    assert shell.json["shipped"] == []


def test_heads_are_listed(shell: Shell, shipped: list[SimpleNamespace]) -> None:
    shipped.append(P_EAGLE)
    assert shell("heads") == 0
    assert "smollm2-135m-p-eagle" in shell.out
    shell("heads", "--json")
    assert shell.json["shipped"][0]["num_speculative_tokens"] == 7
