"""What a script for vLLM passes: accepted where it changes nothing, refused with the reason."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle import LLM, SamplingParams
from peagle.compatibility import (
    ANY,
    GENERATE_ARGUMENTS,
    LLM_ARGUMENTS,
    SAMPLING_ARGUMENTS,
    SPECULATIVE_ARGUMENTS,
    Unused,
    drop_unused,
)
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.errors import ConfigError, RequestError

TABLES = {
    "LLM": (LLM_ARGUMENTS, EngineConfig),
    "SamplingParams": (SAMPLING_ARGUMENTS, SamplingParams),
    "speculative_config": (SPECULATIVE_ARGUMENTS, SpeculativeConfig),
    "generate": (GENERATE_ARGUMENTS, None),
}
Table = Mapping[str, Unused]


@pytest.mark.parametrize(("table", "config"), TABLES.values(), ids=TABLES.keys())
def test_an_argument_is_ours_or_in_the_table(table: Table, config: Any) -> None:
    ours = {field.name for field in fields(config)} if config else set()
    assert not ours & table.keys()
    for name, unused in table.items():
        assert unused.accepted, name
        assert unused.reason or ANY in unused.accepted, name


@given(st.sampled_from(list(TABLES)), st.data())
def test_accepted_values_vanish_and_others_are_refused(where: str, data: st.DataObject) -> None:
    table = TABLES[where][0]
    name = data.draw(st.sampled_from(sorted(table)))
    unused = table[name]
    accepted = st.integers() if ANY in unused.accepted else st.sampled_from(unused.accepted)
    assert drop_unused({name: data.draw(accepted), "ours": 1}, table, ConfigError) == {"ours": 1}
    if ANY not in unused.accepted:
        with pytest.raises(ConfigError, match="is not supported: ") as caught:
            drop_unused({name: "something else"}, table, ConfigError)
        assert unused.reason in str(caught.value)


def test_true_is_not_the_number_one() -> None:
    with pytest.raises(ConfigError, match="one device"):
        drop_unused({"tensor_parallel_size": True}, LLM_ARGUMENTS, ConfigError)


class OutputKind(enum.Enum):
    """As vLLM's RequestOutputKind."""

    CUMULATIVE = 0
    DELTA = 1


def test_sampling_params_take_what_vllms_take() -> None:
    params = SamplingParams(
        max_tokens=3,
        prompt_logprobs=None,
        detokenize=True,
        output_kind=OutputKind.CUMULATIVE,
        stop=None,
        stop_token_ids=None,
        logit_bias=None,
        bad_words=None,
    )
    assert params == SamplingParams(max_tokens=3)
    assert replace(params, max_tokens=4) == SamplingParams(max_tokens=4)
    assert SamplingParams(max_tokens=None).max_tokens is None
    with pytest.raises(RequestError, match="those of answers"):
        SamplingParams(prompt_logprobs=1)
    with pytest.raises(RequestError, match="all the text so far"):
        SamplingParams(output_kind=OutputKind.DELTA)
    with pytest.raises(TypeError, match="max_tokns"):
        SamplingParams(max_tokns=1)


def test_a_speculative_config_for_vllm_is_read() -> None:
    config = SpeculativeConfig.from_mapping(
        {
            "method": "eagle3",
            "parallel_drafting": True,
            "model": "h",
            "num_speculative_tokens": 5,
            "draft_tensor_parallel_size": 1,
            "max_model_len": None,
            "prompt_lookup_max": None,
        }
    )
    assert config == SpeculativeConfig(method="p-eagle", model="h", num_speculative_tokens=5)
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size=2 is not supported"):
        SpeculativeConfig.from_mapping({"draft_tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="did you mean 'parallel_drafting'"):
        SpeculativeConfig.from_mapping({"paralel_drafting": True})


def test_an_argument_that_cannot_be_is_refused_before_a_model_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="one device"):
        LLM("nowhere/nothing", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="unknown key 'tensor_paralel_size'"):
        LLM("nowhere/nothing", tensor_paralel_size=2)
