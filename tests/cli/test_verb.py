"""What every verb understands: -q, -v, --config FILE, underscores and dotted flags."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from peagle import __version__
from peagle.cli.main import app
from peagle.cli.verb import join_dotted_flags
from peagle.config import SpeculativeConfig

from .fakes import ANSWER, Shell

HEAD_OF_FIVE = SpeculativeConfig(model="h", num_speculative_tokens=5)


def _verbs(group: Any = None, above: str = "") -> dict[str, Any]:
    """Every command by its full name, those of groups included."""
    found = {}
    for name, command in (group or typer.main.get_command(app)).commands.items():
        full = f"{above} {name}".strip()
        is_group = hasattr(command, "commands")  # typer brings its own click
        found |= _verbs(command, full) if is_group else {full: command}
    return found


@pytest.mark.parametrize(("verb", "command"), _verbs().items(), ids=lambda part: str(part))
def test_every_verb_takes_quiet_verbose_and_a_config_file(verb: str, command: Any) -> None:
    flags = {flag for parameter in command.params for flag in parameter.opts}
    assert {"--quiet", "-q", "--verbose", "-v", "--config"} <= flags


@pytest.mark.parametrize("args", [["-q", "generate", "m", "Hi"], ["generate", "m", "Hi", "-q"]])
def test_quiet_leaves_results_alone(shell: Shell, args: list[str]) -> None:
    assert shell(*args) == 0
    assert (shell.out, shell.err) == (f"{ANSWER}\n", "")


def test_errors_are_said_in_spite_of_quiet(shell: Shell) -> None:
    assert shell("generate", "m", "-q") == 2
    assert shell.err.startswith("error: no prompt was given")


@pytest.mark.parametrize(
    ("args", "level"),
    [
        (["heads"], "WARNING"),
        (["heads", "-v"], "INFO"),
        (["-v", "heads"], "INFO"),
        (["-v", "heads", "-v"], "DEBUG"),
        (["heads", "-vv"], "DEBUG"),
        (["heads", "-q"], "ERROR"),
    ],
)
def test_verbosity_is_counted_before_and_after_the_verb(
    shell: Shell, args: list[str], level: str
) -> None:
    assert shell(*args) == 0
    assert logging.getLevelName(logging.getLogger("peagle").level) == level


@pytest.mark.parametrize("args", [["version"], ["-V"], ["--version"]])
def test_version_is_said_in_three_ways(shell: Shell, args: list[str]) -> None:
    assert shell(*args) == 0
    assert shell.out == f"peagle {__version__}\n"


def test_help_is_a_verb(shell: Shell) -> None:
    assert shell("help") == 0
    assert "generate" in shell.out
    assert shell("help", "bench", "compare") == 0
    assert "--tolerance" in shell.out
    assert shell("help", "genrate") == 2
    assert "Did you mean 'generate'?" in shell.err


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculative_config", '{"model": "h", "num_speculative_tokens": 5}'],
        ["--speculative-config.model", "h", "--speculative-config.num_speculative_tokens", "5"],
        ["--speculative_config.model=h", "--speculative_config.num_speculative_tokens=5"],
        ["--speculative-config", '{"model": "h"}', "--speculative-config.num_speculative_tokens=5"],
        ["--spec_model", "h", "--spec_tokens", "5"],
    ],
)
def test_flags_are_written_as_for_vllm(shell: Shell, flags: list[str]) -> None:
    assert shell("generate", "m", "Hi", *flags, "--max_tokens", "7") == 0
    assert shell.llm.speculative_config == HEAD_OF_FIVE
    assert shell.llm.params[0].max_tokens == 7


def test_a_method_may_have_an_underscore(shell: Shell) -> None:
    assert shell("generate", "m", "Hi", "--spec-method", "p_eagle", "--spec-model", "h") == 0
    assert shell.llm.speculative_config == SpeculativeConfig(method="p-eagle", model="h")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculative-config.", "h"], "names no key"),
        (["--speculative-config.modle", "h"], "unknown key 'modle'"),
        (["--speculative-config.a=1", "--speculative-config.a.b=1"], "has a value already"),
        (["--speculative-config", "{oops", "--speculative-config.model=h"], "not valid JSON"),
        (["--temperature.x", "1"], "No such option"),
    ],
)
def test_a_dotted_flag_that_makes_no_sense_is_refused(
    shell: Shell, flags: list[str], message: str
) -> None:
    assert shell("generate", "m", "Hi", *flags) == 2
    assert message in shell.err


def test_what_follows_two_dashes_is_somebody_elses() -> None:
    words = ["--a.b", "1", "--", "--a.c", "2"]
    assert join_dotted_flags(words, ["--a"]) == ['--a={"b": 1}', "--", "--a.c", "2"]


KEYS = st.text("abcdefgh_", min_size=1, max_size=3)
VALUES = st.one_of(st.integers(), st.booleans(), st.none(), st.text("xyz {=.-", max_size=5))
TREES = st.recursive(
    VALUES, lambda inside: st.dictionaries(KEYS, inside, min_size=1, max_size=3), max_leaves=6
)


def _leaves(tree: Any, path: str) -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(path, tree)]
    return [leaf for key, inside in tree.items() for leaf in _leaves(inside, f"{path}.{key}")]


@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=3), st.data())
def test_an_object_is_the_same_whole_and_in_dotted_flags(
    whole: dict[str, Any], data: st.DataObject
) -> None:
    words: list[str] = []
    for path, value in data.draw(st.permutations(_leaves(whole, "--spec"))):
        text = json.dumps(value)
        words += [f"{path}={text}"] if data.draw(st.booleans()) else [path, text]
    (joined,) = join_dotted_flags(words, ["--spec"])
    assert json.loads(joined.removeprefix("--spec=")) == whole


FILE = """
model: m
prompts: [Hi, Ho]
max-tokens: 7
temperature: 0.5
top_p: 0.9
ignore_eos: true
stop: [a, b]
stop-token-ids: [5]
logit-bias: {42: -100}
seed: null
speculative_config:
  model: h
  num_speculative_tokens: 5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "generate.yaml"
    path.write_text(FILE)
    return path


def test_a_file_says_what_flags_would(shell: Shell, file: Path) -> None:
    assert shell("generate", "--config", str(file)) == 0
    assert shell.llm.model == "m"
    assert shell.llm.requests == ["<user>Hi", "<user>Ho"]
    assert shell.llm.speculative_config == HEAD_OF_FIVE
    params = shell.llm.params[0]
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 0.9)
    assert (params.stop, params.stop_token_ids, params.seed) == (("a", "b"), (5,), None)
    assert params.ignore_eos
    assert params.logit_bias == {42: -100.0}


def test_flags_win_over_the_file(shell: Shell, file: Path) -> None:
    line = ("generate", "other", "Hey", "--max-tokens", "9", "--stop", "c", "--config", str(file))
    assert shell(*line) == 0
    assert shell.llm.model == "other"
    assert shell.llm.requests == ["<user>Hey"]
    assert (shell.llm.params[0].max_tokens, shell.llm.params[0].stop) == (9, ("c",))
    assert shell.llm.params[0].temperature == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-tokns: 3", "unknown key 'max_tokns' in FILE\nhint: did you mean 'max-tokens'?"),
        ("config: x", "unknown key 'config'"),
        ("max-tokens: many", "--max-tokens many does not fit"),
        ("max-tokens: true", "max-tokens=True does not fit"),
        ("max-tokens: [1, 2]", "max-tokens=[1, 2] does not fit\nhint: use one value"),
        ("stop: a", "stop='a' does not fit\nhint: use a list"),
        ("ignore-eos: 1", "ignore-eos=1 does not fit\nhint: use true or false"),
        ("system: {a: 1}", "does not fit"),
        ("- 1", "is not a mapping"),
        ("a: [", "is not valid YAML: line 1, column 5: expected"),
        ("\udce9", "is not UTF-8 text"),
    ],
)
def test_a_wrong_file_is_one_line_and_a_hint(
    shell: Shell, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert shell("generate", "m", "Hi", "--config", str(file)) == 2
    assert message.replace("FILE", str(file)) in shell.err
    assert shell.err.count("\n") <= 2
    assert shell.engines == []


def test_a_missing_file_is_named(shell: Shell) -> None:
    assert shell("heads", "--config", "/nonexistent.yaml") == 2
    assert "cannot read /nonexistent.yaml" in shell.err
