"""Recipes say what is wrong with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from peagle.errors import ConfigError
from peagle.train.recipe import load_recipe, recipe_from, recipe_keys
from peagle.train.recipe_yaml import allowed_values, commented_yaml

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
GOOD = {"data": {"path": "x"}, "schedule": {"steps": 3}}


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_shipped_recipe_is_valid(path: Path) -> None:
    assert load_recipe(path).data.path


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("data: {path: x}\nschedule: {steps: 3}\noptimizer: {learning_rate: 1e-4}\n")
    recipe = load_recipe(file, ["schedule.steps=9", "optimizer.betas=[0.8, 0.9]", "run.seed=4"])
    assert (recipe.schedule.steps, recipe.run.seed) == (9, 4)
    assert recipe.optimizer.learning_rate == pytest.approx(1e-4)  # YAML reads it as a string
    assert recipe.optimizer.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimiser": {}}, "did you mean 'optimizer'"),
        ({"optimizer": {"learning_rat": 1}}, "did you mean 'learning_rate'"),
        ({"optimizer": {"learning_rate": "fast"}}, "optimizer.learning_rate='fast' does not fit"),
        ({"head": {"method": "eagle4"}}, "head.method='eagle4' does not fit"),
        ({"data": {"path": "x", "tokens_per_row": 1.5}}, "data.tokens_per_row=1.5 does not fit"),
        ({"run": {"partitions": "some"}}, "run.partitions='some' does not fit"),
        ({"schedule": {"steps": 3, "epochs": 1}}, "exactly one of"),
        ({"cod": {"retention": 0}}, "cod.retention=0 is out of range (hint: use a number > 0)"),
        ({"loss": 3}, "loss=3 does not fit (hint: use a mapping"),
        ({"data": {"path": "x", "more": ["y"], "features": "f"}}, "data.more has no stored"),
        ({"run": {"log_every": 0}}, "run.log_every=0 is out of range (hint: use a number >= 1)"),
        ({"run": {"keep_checkpoints": 0}}, "run.keep_checkpoints=0 is out of range"),
        ({"run": {"device": 3}}, "run.device=3 does not fit"),
        ({"data": None}, "data=None does not fit"),
        ({"optimizer": {"betas": [0.9, "x"]}}, "optimizer.betas.1='x' does not fit"),
        ({"vllm": {"requests": 0}}, "vllm.requests=0 is out of range"),
        ({"run": {"partitions": 0}}, "run.partitions=0 is out of range"),
        ({"run": {"partitions": 0}}, "use a number >= 1 or 'auto'"),
        ({"run": {"folder": ""}}, "use a text that is not empty"),
        ({"schedule": {"steps": 0}}, "schedule.steps=0 is out of range"),
        ({"schedule": {"epochs": 0}}, "schedule.epochs=0 is out of range"),
        ({"schedule": {"steps": 3, "warmup": 5}}, "schedule.warmup=5 is out of range"),
        ({"schedule": {"steps": 3, "kind": "x"}}, "use 'linear', 'cosine' or 'constant'"),
        ({"optimizer": {"learning_rate": -1}}, "optimizer.learning_rate=-1 is out of range"),
        ({"optimizer": {"learning_rate": "nan"}}, "optimizer.learning_rate='nan' is out of range"),
        ({"optimizer": {"weight_decay": ".inf"}}, "optimizer.weight_decay='.inf' does not fit"),
        ({"optimizer": {"weight_decay": -1}}, "optimizer.weight_decay=-1 is out of range"),
        ({"optimizer": {"max_grad_norm": -1}}, "optimizer.max_grad_norm=-1 is out of range"),
        ({"optimizer": {"betas": [2, 2]}}, "optimizer.betas.0=2 is out of range"),
        ({"optimizer": {"eps": -1}}, "optimizer.eps=-1 is out of range"),
        ({"data": {"path": "x", "held_out_share": -1}}, "data.held_out_share=-1 is out of range"),
        ({"loss": {"weighting": "x"}}, "use 'depth' or 'acceptance'"),
        ({"loss": {"kind": "x"}}, "use 'kl', 'ce' or 'tv'"),
        ({"loss": {"depth_decay": -1}}, "loss.depth_decay=-1 is out of range"),
        ({"head": {"mask_token_id": -5}}, "head.mask_token_id=-5 is out of range"),
        ({"run": {"memory_gib": -3}}, "run.memory_gib=-3 is out of range"),
        ({"run": {"seed": 2**64}}, "is out of range (hint: use fewer digits)"),
    ],
)
def test_a_mistake_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from(GOOD | options)
    assert message in str(caught.value)


def test_an_overridden_length_replaces_the_recipes(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("data: {path: x}\nschedule: {minutes: 7, warmup: 0.5}\n")
    schedule = load_recipe(file, ["schedule.epochs=3"]).schedule
    assert (schedule.epochs, schedule.minutes, schedule.warmup) == (3.0, None, 0.5)
    assert load_recipe(file, ["schedule.warmup=0.1"]).schedule.minutes == 7
    with pytest.raises(ConfigError, match="exactly one of steps, epochs and minutes"):
        load_recipe(file, ["schedule.epochs=3", "schedule.steps=3"])


def test_the_printed_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    for path in RECIPES:
        recipe = load_recipe(path, ["run.folder='a: b # c'", 'data.more=["x\\ny", "ü"]'])
        copy = tmp_path / "copy.yaml"
        copy.write_text(commented_yaml(recipe), encoding="utf-8")
        assert load_recipe(copy) == recipe


def test_every_key_says_what_it_means_and_takes() -> None:
    keys = list(recipe_keys())
    assert len(keys) > 60
    for key in keys:
        assert key.doc.text.endswith((".", "..."))
        assert allowed_values(key.annotation)
        assert (key.default is None) == allowed_values(key.annotation).endswith("or null")


def test_every_number_of_a_recipe_has_a_range() -> None:
    ranges = {key.full_name: allowed_values(key.annotation) for key in recipe_keys()}
    free = [
        name for name, words in ranges.items() if re.search(r"(int|float)(?! (>=|>|in) )", words)
    ]
    assert free == []


def test_an_override_without_section_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("")
    with pytest.raises(ConfigError, match="is not an override"):
        load_recipe(file, ["steps=3"])
    with pytest.raises(ConfigError, match="no recipe"):
        load_recipe(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("content", "overrides", "message"),
    [
        ("- a\n- b\n", [], "is not a recipe"),
        ("a: [", [], "is not valid YAML"),
        ("a: 2026-99-99", [], "is not valid YAML"),
        ("", ["run.seed=2026-99-99"], "holds no YAML value"),
        ("loss: 3\n", ["loss.kind=ce"], "section 'loss'"),
        ("", ["loss.kind=["], "holds no YAML value"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused(
    content: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(file, overrides)
