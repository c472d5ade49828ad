"""Whatever is written for a flag or a recipe's key: it works, or it is one line and exit 2.

Flags are read from the commands and keys from the recipe, so that new ones are tried as well. No
model is loaded: engines are fakes, and other references lead nowhere.
"""

from __future__ import annotations

import io
import itertools
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle.cli import engines
from peagle.cli.main import app, main
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.train.recipe import RecipeKey, load_recipe, recipe_keys
from tests.tiny.models import DEEP

from .fakes import FakeLLM

NUMBERS = (
    "0",
    "1",
    "-1",
    "3",
    "0.5",
    "1e-9",
    "-0.0",
    "nan",
    "inf",
    "1e400",
    "9" * 30,
    "0x10",
    "1_0",
)
TEXTS = (
    "",
    " ",
    "x",
    "é 🙂",
    "-",
    "--",
    "a,b",
    "1,2",
    "1,,2",
    "{}",
    '{"a": 1}',
    "[1]",
    "null",
    "a=b",
)
# Nothing in /dev: whoever runs this as root would lose it to a fault. A socket is refused alike.
PATHS = (".", "missing/folder", "file.txt", "folder", "/proc/none", "socket")
# What a verb needs besides, so that it gets as far as it can without a model.
ARGUMENTS = {
    "demo": ["--prompts", "1"],
    "generate": ["m", "Hi"],
    "chat": ["m"],
    "prepare": ["--model", "missing", "--prompts", "prompts.jsonl", "--out", "data"],
    "capture": ["data", "--model", "missing", "--out", "states"],
    "train": ["recipe.yaml", "--print-config"],
    "evaluate": ["missing", "--prompts", "prompts.jsonl"],
    "bench run": ["missing", "--out", "results"],
    "bench compare": ["a", "b"],
    "tune": ["results"],
    "simulate": ["--model", "config.json", "--gpu", "h200", "--acceptance", "0.7,0.5"],
    "report": ["results"],
    "serve": ["org/m", "--backend", "vllm", "--print-command"],
    "deploy sagemaker plan": ["gpt-oss-20b", "--region", "us-east-1"],
    "export": ["missing", "out", "--to", "vllm"],
    "doctor": ["--model", "missing", "--data", "data"],
    "heads": [],
    "env": [],
    "version": [],
    "help": [],
}


def verbs(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, inside in command.commands.items():
        if hasattr(inside, "commands"):
            yield from verbs(inside, f"{path}{name} ")
        else:
            yield f"{path}{name}", inside


COMMAND = typer.main.get_command(app)
# Other verbs of `deploy` ask AWS, and have tests of their own with a fake of it.
VERBS = {
    name: verb
    for name, verb in verbs(COMMAND)
    if not name.startswith("deploy ") or name.endswith(" plan")
}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of its own to work in, and no engine but a fake."""
    folder = tmp_path_factory.mktemp("anything")
    (folder / "folder").mkdir()
    (folder / "file.txt").write_text("Hi\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "Hi"}\n')
    (folder / "config.json").write_text(json.dumps(DEEP.llama_config().to_dict()))
    (folder / "recipe.yaml").write_text("data: {path: data}\nschedule: {minutes: 7}\n")

    def build(model: str, engine: EngineConfig, drafter: SpeculativeConfig | None) -> FakeLLM:
        return FakeLLM(model, engine, drafter)

    with pytest.MonkeyPatch.context() as patch, socket.socket(socket.AF_UNIX) as server:
        patch.chdir(folder)
        server.bind("socket")
        patch.setattr(engines, "build_llm", build)
        patch.setattr(typer.main, "get_command", lambda _: COMMAND)  # building it takes longest
        patch.delenv("PEAGLE_DEBUG", raising=False)
        yield


def run(args: list[str]) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        out, err = io.StringIO(), io.StringIO()
        for name, stream in (("stdout", out), ("stderr", err), ("stdin", io.StringIO())):
            patch.setattr(sys, name, stream)
        return main(args), out.getvalue(), err.getvalue()


def check(args: list[str]) -> str:
    """-> stdout of what worked."""
    code, out, err = run(args)
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert code in (0, 2), (args, err)
    assert len(errors) == (1 if code else 0), (args, err)
    assert "Traceback" not in err
    assert "unexpected" not in err
    return out


def options_of(verb: str) -> list[Any]:
    return [p for p in VERBS[verb].params if p.opts[0].startswith("--") and "--help" not in p.opts]


def takes_a_value(option: Any) -> bool:
    return not option.is_flag and not option.count


@st.composite
def flags(draw: st.DrawFn, verb: str) -> list[str]:
    """A few of a verb's flags, each with a value of the right kind or of any other."""
    words: list[str] = []
    for option in draw(st.lists(st.sampled_from(options_of(verb)), min_size=2, max_size=4)):
        words.append(draw(st.sampled_from([*option.opts, *option.secondary_opts])))
        if takes_a_value(option):
            words.append(draw(st.one_of(*map(st.sampled_from, (NUMBERS, TEXTS, PATHS)))))
    return words


def test_every_verb_is_tried() -> None:
    assert set(ARGUMENTS) == set(VERBS)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ARGUMENTS)
def test_every_flag_works_or_is_one_line(verb: str) -> None:
    """A number, a text and a path for each; other ones for the next flag."""
    values = list(map(itertools.cycle, (NUMBERS, TEXTS, PATHS)))
    for option in options_of(verb):
        line = [*verb.split(), *ARGUMENTS[verb]]
        if takes_a_value(option):
            for kind in values:
                check([*line, option.opts[0], next(kind)])
        else:
            for name in (*option.opts, *option.secondary_opts):
                check([*line, name])


@pytest.mark.slow
@pytest.mark.parametrize("verb", ARGUMENTS)
@settings(max_examples=10)
@given(data=st.data())
def test_any_flags_work_or_are_one_line(verb: str, data: st.DataObject) -> None:
    check([*verb.split(), *ARGUMENTS[verb], *data.draw(flags(verb))])


VALUES = st.one_of(
    st.sampled_from((*NUMBERS, *TEXTS, *PATHS)),
    st.integers().map(str),
    st.floats().map(str),
    st.recursive(
        st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | st.text(max_size=3),
        lambda inside: (
            st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=2)
        ),
        max_leaves=4,
    ).map(json.dumps),
)


@pytest.mark.slow
def test_every_key_of_a_recipe_fits_or_is_one_line() -> None:
    values = list(map(itertools.cycle, (NUMBERS, TEXTS, PATHS)))
    for key in recipe_keys():
        for kind in values:
            check_key(key, next(kind))


@pytest.mark.slow
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(key=st.sampled_from(list(recipe_keys())), value=VALUES)
def test_any_value_of_a_recipes_key_fits_or_is_one_line(key: RecipeKey, value: str) -> None:
    check_key(key, value)


def check_key(key: RecipeKey, value: str) -> None:
    override = f"{key.full_name}={value}"
    printed = check(["train", "recipe.yaml", override, "--print-config"])
    if printed:  # it fits, and what is printed is the same recipe
        Path("copy.yaml").write_text(printed, encoding="utf-8")
        assert load_recipe(Path("copy.yaml")) == load_recipe(Path("recipe.yaml"), [override])


@pytest.mark.slow
@settings(max_examples=40)
@given(text=st.text(max_size=40) | st.recursive(st.text(max_size=5), st.lists).map(yaml.safe_dump))
def test_any_recipe_file_is_a_recipe_or_one_line(text: str) -> None:
    Path("any.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    check(["train", "any.yaml", "--print-config"])
