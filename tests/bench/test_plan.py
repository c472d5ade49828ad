"""Keys of a grid, from flags and from files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from peagle.bench.results.settings import Setting
from peagle.bench.run.null_backend import NullBackend
from peagle.bench.run.plan import BenchPlan, make_plan, read_yaml
from peagle.bench.run.sessions import Engines, engine_config, vllm_options
from peagle.errors import ConfigError


def plan(**given: Any) -> BenchPlan:
    return make_plan({"model": "m", "out": "o", **given}, "here")


def test_flags_and_a_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(
        "model: m\nout: o\nspec-model: [a, b]\nspec_tokens: [3, 5]\nconcurrency: 4\n"
        "request_rate: [0.5, 2]\nworkload: [offline, 'synthetic:8,4']\nmax_tokens: 64\n"
    )
    flags = {
        "spec_model": "a,b",
        "spec_tokens": "3,5",
        "concurrency": "4",
        "max_tokens": 64,
        "request_rate": "0.5,2",
        "workload": "offline,synthetic:8,4",
    }
    assert make_plan(read_yaml(file), "file") == plan(**flags)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec_tokns": "3"}, "unknown key 'spec_tokns' .*did you mean 'spec_tokens'"),
        ({"concurrency": "1,x"}, r"concurrency\.1='x' does not fit"),
        ({"request_rate": "inf"}, "request_rate=inf is out of range"),
        ({"temperature": float("nan")}, "temperature=nan is out of range"),
        ({"concurrency": [1.5]}, r"concurrency\.0=1.5 does not fit"),
        ({"concurrency": "0"}, "concurrency=0 is out of range"),
        ({"request_rate": "-1"}, "request_rate=-1.0 is out of range"),
        ({"repeats": 0}, "repeats=0"),
        ({"repeats": "three"}, "repeats='three' does not fit"),
        ({"raw": "perhaps"}, "raw='perhaps' does not fit"),
        ({"spec_tokens": "3"}, "no drafter"),
        ({"spec_method": "medusa"}, "medusa is unknown"),
        ({"backend": "tensorrt"}, "backend 'tensorrt' is unknown"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype has no effect on backend embedded"),
        ({"backend": "http://x", "device": "cpu"}, "device has no effect"),
        ({"backend": "http://x", "spec_model": "a"}, "the one drafter that its server"),
        ({"backend": "http://x", "spec_method": "p-eagle", "spec_tokens": "3,5"}, "one drafter"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(**given)
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize("missing", ["model", "out"])
def test_model_and_out_are_needed(missing: str) -> None:
    given = {"model": "m", "out": "o"}
    del given[missing]
    with pytest.raises(ConfigError, match=f"does not set {missing}"):
        make_plan(given, "here")


def test_broken_yaml_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    file.write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(file)
    file.write_text("- a")
    with pytest.raises(ConfigError, match="not a mapping"):
        read_yaml(file)


def test_engine_has_room_for_all_streams_unless_told() -> None:
    assert engine_config(plan(concurrency="1,128")).max_num_seqs == 128
    assert engine_config(plan(concurrency="128", max_num_seqs=8)).max_num_seqs == 8


def test_engines_of_one_gpu_share_its_memory() -> None:
    settings = [Setting("none"), Setting("ngram", 2), Setting("ngram", 5)]
    asked = []

    def build(model: str, config: Any, drafter: Any, vllm: Any) -> Any:
        asked.append(config.gpu_memory_utilization)
        return NullBackend()

    engines = Engines(plan(gpu_memory_utilization=0.8), settings, build)
    for setting in settings:
        engines.get(setting)
    assert asked == pytest.approx([0.4, 0.8])  # ngram's engine serves both depths


def test_vllm_gets_its_own_kinds_of_quantization() -> None:
    given = plan(backend="vllm", quantization="awq", max_num_seqs=8)
    assert engine_config(given).quantization is None
    options = vllm_options(given)
    assert options is not None
    assert (options.quantization, options.max_num_seqs) == ("awq", 8)
    assert vllm_options(plan(quantization="fp8")) is None
    assert engine_config(plan(quantization="fp8")).quantization == "fp8"


def test_one_stream_is_the_default_unless_rates_are_given() -> None:
    assert plan().concurrencies == [1]
    assert plan(request_rate="3").concurrencies == []
