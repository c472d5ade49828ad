"""vLLM's own parser takes what the SageMaker container makes of our environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, get_type_hints

import pytest

from peagle.backends.vllm.options import VllmOptions
from peagle.backends.vllm.released import released_models
from peagle.deploy.config import DeployConfig
from peagle.deploy.container import environment
from peagle.deploy.plan import make_plan

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

Translate = Callable[[Mapping[str, str]], list[str]]


def by_shell(variables: Mapping[str, str]) -> list[str]:
    """As vLLM's own entry script does: the flag, and the value if there is one."""
    return ["--port", "8080", *_words(variables, switches=())]


def by_python(variables: Mapping[str, str]) -> list[str]:
    """As AWS' later containers do: beside that, `true` is a flag alone and `false` none at all."""
    return ["--port", "8080", *_words(variables, switches=("true", "false"))]


def _words(variables: Mapping[str, str], switches: tuple[str, ...]) -> Iterator[str]:
    for name, value in sorted(variables.items()):
        flag = name.removeprefix("SM_VLLM_").lower().replace("_", "-")
        if value in switches:
            yield from [f"--{flag}"] * (value == "true")
        else:
            yield from (f"--{flag}", *([value] if value else []))


@pytest.fixture(scope="module")
def parse() -> Callable[[list[str]], Any]:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args


@pytest.mark.parametrize("translate", [by_shell, by_python])
@pytest.mark.parametrize("name", released_models())
def test_a_planned_environment_starts_the_pair_as_the_plan_says(
    parse: Callable[[list[str]], Any], name: str, translate: Translate
) -> None:
    model = released_models()[name]
    plan = make_plan(
        name,
        DeployConfig(instance_type="ml.g7e.12xlarge"),
        region="us-east-1",
        drafter={"num_speculative_tokens": 3},
        options=VllmOptions(tensor_parallel_size=2, max_model_len=4096),
        now=datetime.now(UTC),
    )
    parsed = parse(translate(plan.environment))
    assert parsed.model == model.target
    assert parsed.port == 8080
    assert parsed.speculative_config == {
        "method": "eagle3",
        "model": model.head,
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    assert (parsed.tensor_parallel_size, parsed.max_model_len) == (2, 4096)
    given = {"tensor_parallel_size": 2, "max_model_len": 4096}
    for option, value in {**model.options.given(), **given}.items():
        assert getattr(parsed, option) == value, option


@pytest.mark.parametrize("translate", [by_shell, by_python])
@pytest.mark.parametrize("switch", [True, False])
def test_every_option_reaches_vllm_under_its_name(
    parse: Callable[[list[str]], Any], translate: Translate, switch: bool
) -> None:
    values: dict[str, Any] = {"dtype": "float32", "quantization": "fp8", "kv_cache_dtype": "fp8"}
    values["block_size"] = 16
    for name, kind in get_type_hints(VllmOptions).items():
        value = values.get(name, switch if kind == bool | None else 1)
        parsed = parse(translate(environment("org/m", {name: value})))
        assert (parsed.model, getattr(parsed, name)) == ("org/m", value), name
