"""Recipes say what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle.errors import ConfigError
from peagle.train.recipe import load_recipe, recipe_from

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
        ({"cod": {"retention": 0}}, "cod.retention=0.0 is out of range"),
        ({"loss": 3}, "loss=3 does not fit (hint: use a mapping"),
        ({"data": {"path": "x", "more": ["y"], "features": "f"}}, "data.more has no stored"),
        ({"run": {"log_every": 0}}, "run.log_every must be at least 1"),
        ({"run": {"keep_checkpoints": 0}}, "run.keep_checkpoints must be at least 1"),
        ({"run": {"device": 3}}, "run.device=3 does not fit"),
        ({"data": None}, "data=None does not fit"),
        ({"optimizer": {"betas": [0.9, "x"]}}, "optimizer.betas.1='x' does not fit"),
        ({"vllm": {"requests": 0}}, "vllm.requests=0 is out of range"),
        ({"run": {"partitions": 0}}, "run.partitions must be at least 1"),
    ],
)
def test_a_mistake_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from(GOOD | options)
    assert message in str(caught.value)


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
