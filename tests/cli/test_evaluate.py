"""`peagle evaluate`: from data or prompts, greedy or sampled, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.main import main
from peagle.engine.llm import LLM
from peagle.sampling_params import SamplingParams
from tests.tiny.folders import write_head, write_model

from .fakes import Shell

CPU = ("--device", "cpu", "--dtype", "float64")


def engine_figures(model: str, head: str, k: int, prompts: str) -> dict[str, Any]:
    """What the engine reports when it is asked the same."""
    llm = LLM(
        model,
        device="cpu",
        dtype="float64",
        max_num_seqs=8,
        speculative_config={"model": head, "num_speculative_tokens": k},
    )
    texts = [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()]
    messages = [[{"role": "user", "content": text}] for text in texts]
    llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=20))
    return llm.stats.as_dict()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_figures_on_prompts_are_those_of_the_engine(
    method: str, command: Shell, model: str, prompts: str, tmp_path: Path
) -> None:
    head = str(write_head(tmp_path / "head", Path(model), method))
    arguments = ("evaluate", head, "--prompts", prompts, "--max-tokens", "20", *CPU)
    assert command(*arguments, "--json") == 0
    found = command.json
    assert (found["method"], found["rows"], found["num_speculative_tokens"]) == (method, 8, 4)
    everything = found["acceptance"]["greedy"]["all"]
    for k in (1, 3, 4):
        stats = engine_figures(model, head, k, prompts)
        expected = round(stats["mean_acceptance_length"], 4)
        assert everything["acceptance_length"][k - 1] == expected
    expected = [round(x, 4) for x in stats["per_position_acceptance"]]
    assert everything["per_position_acceptance"] == expected
    assert found["acceptance"]["greedy"]["category:a"]["documents"] == 4
    assert "provenance" in found


def test_data_gives_a_table(command: Shell, head: str, data: str) -> None:
    assert command("evaluate", head, "--data", data, "--spec-tokens", "2", *CPU) == 0
    assert "mean acceptance length, greedy" in command.out
    assert "all (8)" in command.out
    assert "K=2" in command.out
    assert "K=3" not in command.out


@pytest.mark.slow
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_trees_stand_beside_chains(
    method: str, command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    head = str(write_head(tmp_path / "head", Path(model), method))
    arguments = ("evaluate", head, "--data", data, "--spec-tokens", "2", "--spec-nodes")
    assert command(*arguments, "9", *CPU, "--json") == 0
    lengths = command.json["trees"]["all"]["acceptance_length"]
    assert len(lengths) == 9
    assert lengths == sorted(lengths)
    assert command(*arguments, "9", *CPU) == 0
    assert "trees of depth 2" in command.out
    assert "N=9" in command.out
    assert command(*arguments, "64", *CPU) == 2
    assert "--spec-nodes 64 is out of range" in command.err


def test_a_beam_is_no_deeper_than_the_engines(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    head = str(write_head(tmp_path / "head", Path(model), "eagle3", max_speculative_tokens=9))
    arguments = ("evaluate", head, "--data", data, "--limit", "1", "--spec-nodes", "5", *CPU)
    assert command(*arguments, "--spec-tokens", "9") == 2
    assert "cannot draft 9 tokens behind each other in a tree" in command.err
    assert "use 1 to 8" in command.err
    assert command(*arguments, "--json") == 0
    assert command.json["num_speculative_tokens"] == 8


def test_sampled_text_is_verified_both_ways(command: Shell, head: str, prompts: str) -> None:
    sampled = ("--temperature", "0.9", "--top-p", "0.9", "--limit", "3", "--json")
    assert command("evaluate", head, "--prompts", prompts, *sampled, *CPU) == 0
    acceptance = command.json["acceptance"]
    assert set(acceptance) == {"coupled", "rejection"}
    assert command.json["temperature"] == 0.9
    lengths = {way: groups["all"]["acceptance_length"] for way, groups in acceptance.items()}
    # A rejected draft had its chance: never fewer are kept than when both must say the same.
    assert all(r >= c >= 1 for r, c in zip(lengths["rejection"], lengths["coupled"], strict=True))


def test_another_temperature_than_the_texts_is_remarked(
    command: Shell, head: str, data: str
) -> None:
    assert command("evaluate", head, "--data", data, "--temperature", "1", *CPU) == 0
    assert "no engine would report these figures" in command.err


def test_held_out_rows_alone(command: Shell, head: str, data: str) -> None:
    share = ("--held-out-share", "0.5", "--json")
    assert command("evaluate", head, "--data", data, *share, *CPU) == 0
    assert 0 < command.json["rows"] < 8


def test_prompts_that_were_trained_on_are_not_even_answered(
    command: Shell, head: str, data: str, prompts: str
) -> None:
    share = ("--held-out-share", "0.5", "--json", *CPU)
    assert command("evaluate", head, "--data", data, *share) == 0
    num_rows = command.json["rows"]
    assert command("evaluate", head, "--prompts", prompts, "--max-tokens", "20", *share) == 0
    assert command.json["rows"] == num_rows
    assert f"answering {num_rows} prompts first" in command.err
    limited = ("--limit", "1", "--max-tokens", "4")
    assert command("evaluate", head, "--prompts", prompts, *limited, *share) == 0
    assert command.json["rows"] == 1


def test_a_head_for_another_target_is_refused(
    command: Shell, data: str, prompts: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    other = write_head(tmp_path / "head", model, target_hidden_size=64)
    assert command("evaluate", str(other), "--data", data, *CPU) == 2
    assert "hidden size 64 but the target has 32" in command.err


def test_a_users_error_is_one_line(command: Shell, head: str, data: str, prompts: str) -> None:
    for arguments, message in (
        ((head,), "give either --data or --prompts"),
        ((head, "--data", data, "--prompts", prompts), "give either --data or --prompts"),
        (("/missing", "--data", data), "no head '/missing'"),
        ((head, "--data", "/missing"), "is not a prepared dataset"),
        ((head, "--data", data, "--spec-tokens", "9"), "cannot draft 9 tokens"),
        ((head, "--data", data, "--held-out-share", "0.0"), "is held out"),
        ((head, "--prompts", prompts, "--held-out-share", "0.0"), "no prompt of"),
        ((head, "--data", data, "--held-out-share", "7"), "--held-out-share 7 is out of range"),
        ((head, "--data", data, "--held-out-share", "nan"), "--held-out-share"),
        ((head, "--data", data, "--spec-tokens", "0"), "--spec-tokens 0 is out of range"),
        ((head, "--data", data, "--limit", "0"), "--limit 0 is out of range"),
        ((head, "--data", data, "--limit", "-2"), "--limit -2 is out of range"),
    ):
        assert command("evaluate", *arguments, *CPU) == 2
        assert message in command.err


def test_help_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--help"]) == 0
    assert "--spec-tokens" in capsys.readouterr().out
