"""Flags become SamplingParams, EngineConfig and SpeculativeConfig; nonsense is said at once."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest

from peagle.backends.vllm.options import VllmOptions
from peagle.cli.flags import ConfigFlags, doc_of, in_flags
from peagle.cli.flags.engine import EngineFlags
from peagle.cli.flags.sampling import SamplingFlags
from peagle.cli.flags.vllm import VllmFlags
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.sampling_params import SamplingParams, StructuredOutputsParams

from .fakes import Shell

GROUPS = {EngineFlags: EngineConfig, SamplingFlags: SamplingParams, VllmFlags: VllmOptions}


@pytest.mark.parametrize("group", GROUPS)
def test_flags_have_the_names_and_the_help_of_the_fields_they_set(group: type[ConfigFlags]) -> None:
    config = GROUPS[group]
    for flag in group.parameters():
        assert flag.name in {field.name for field in fields(config)}
        doc = doc_of(config, flag.name) or doc_of(EngineConfig, flag.name)
        assert doc is not None
        assert flag.annotation.__metadata__[0].help.startswith(doc.text)


def test_every_option_of_an_engine_is_a_flag() -> None:
    names = {flag.name for flag in EngineFlags.parameters()}
    assert names == {field.name for field in fields(EngineConfig)} - {"seed"}
    assert {flag.name for flag in VllmFlags.parameters()} == {f.name for f in fields(VllmOptions)}


def test_options_that_both_engines_have_are_of_one_type() -> None:
    """VllmOptions declares them once more, because None is vLLM's default; quantization is
    wider there."""
    ours, vllms = get_type_hints(EngineConfig), get_type_hints(VllmOptions)
    for name in (ours.keys() & vllms.keys()) - {"quantization"}:
        assert ours[name] | None == vllms[name], name


def test_a_default_stands_in_the_help_of_its_flag() -> None:
    flags = {flag.name: flag.annotation.__metadata__[0].help for flag in EngineFlags.parameters()}
    assert str(EngineConfig.max_num_seqs) in flags["max_num_seqs"]
    assert str(EngineConfig.gpu_memory_utilization) in flags["gpu_memory_utilization"]
    assert "the model's" in flags["max_model_len"]


def test_sampling_flags_reach_the_engine(shell: Shell) -> None:
    flags = (
        "--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 3 --stop a "
        "--stop b --stop-token-ids 5 --ignore-eos --min-tokens 2 --repetition-penalty 1.1 "
        "--presence-penalty 0.2 --frequency-penalty 0.3 --bad-words no --n 2"
    )
    assert shell("generate", "m", "Hi", *flags.split(), "--logit-bias", '{"42": -100}') == 0
    assert shell.llm.params[0] == SamplingParams(
        n=2,
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=3,
        stop=("a", "b"),
        stop_token_ids=(5,),
        ignore_eos=True,
        logit_bias={42: -100.0},
        bad_words=("no",),
    )


def test_engine_flags_reach_the_engine(shell: Shell) -> None:
    flags = (
        "--dtype float32 --device cpu --max-model-len 99 --max-num-seqs 2 "
        "--max-num-batched-tokens 64 --block-size 8 --kv-cache-memory-bytes 1000000 "
        "--quantization fp8 --gpu-memory-utilization 0.8"
    )
    assert shell("generate", "m", "Hi", *flags.split()) == 0
    assert shell.llm.config == EngineConfig(
        dtype="float32",
        device="cpu",
        max_model_len=99,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        block_size=8,
        kv_cache_memory_bytes=1_000_000,
        quantization="fp8",
        gpu_memory_utilization=0.8,
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], None),
        (["--spec-method", "none"], None),
        (["--spec-method", "ngram"], SpeculativeConfig(method="ngram")),
        (
            ["--spec-model", "h", "--spec-tokens", "7"],
            SpeculativeConfig(model="h", num_speculative_tokens=7),
        ),
        (
            [
                "--speculative-config",
                '{"method": "eagle3", "parallel_drafting": true, "model": "h"}',
            ],
            SpeculativeConfig(method="p-eagle", model="h"),
        ),
    ],
)
def test_drafter_flags_reach_the_engine(
    shell: Shell, flags: list[str], expected: SpeculativeConfig | None
) -> None:
    assert shell("generate", "m", "Hi", *flags) == 0
    assert shell.llm.speculative_config == expected


def test_structured_outputs_reach_the_engine(shell: Shell) -> None:
    constraint = '{"json": {"type": "array"}, "disable_any_whitespace": true}'
    assert shell("generate", "m", "Hi", "--structured-outputs", constraint) == 0
    assert shell.llm.params[0].structured_outputs == StructuredOutputsParams(
        json={"type": "array"}, disable_any_whitespace=True
    )


BAD = {
    "--structured-outputs {oops": "--structured-outputs is not valid JSON",
    "--structured-outputs {}": "--structured-outputs takes one of json, regex, choice",
    '--structured-outputs {"regex":"a","choice":["b"]}': "but has regex and choice",
    '--structured-outputs {"regx":"a"}': "unknown key 'regx'",
    '--structured-outputs {"json":"{"}': "json is not valid JSON",
    '--structured-outputs {"choice":["a",""]}': "choice is not a list of texts",
    "--logit-bias {oops": "--logit-bias is not valid JSON",
    "--logit-bias [1]": "--logit-bias is not a JSON object",
    '--logit-bias {"a":1}': "--logit-bias maps token ids to numbers",
    '--logit-bias {"1":null}': "--logit-bias maps token ids to numbers",
    "--spec-method ngram --spec-tokens 0": "--spec-tokens 0 is out of range",
    "--spec-method p-eagle": "method p-eagle needs a head",
    "--spec-method ngram --spec-model h": "method ngram takes no head",
    "--spec-tokens 5": "but no drafter",
    "--spec-method none --spec-tokens 5": "but no drafter",
    "--spec-nodes 5": "but no drafter",
    "--spec-method turbo": "Invalid value for '--spec-method'",
    "--speculative-config {} --spec-tokens 5": "both given",
    '--speculative-config {"metod":"ngram"}': "unknown key 'metod'",
    "--temperature -1": "--temperature -1.0 is out of range",
    "--temperature nan": "--temperature nan is out of range",
    "--top-p 0.9": "--top-p has no effect at temperature 0",
    "--n 2": "--n 2 with --temperature 0",
    "--max-tokens 0": "--max-tokens 0 is out of range",
    "--min-tokens 300": "--min-tokens 300 is more than --max-tokens 256",
    "--max-tokens many": "--max-tokens many does not fit",
    "--block-size 0": "--block-size 0 is out of range",
    "--quantization awq": "--quantization 'awq' is unknown",
    "--gpu-memory-utilization 1.5": "--gpu-memory-utilization 1.5 is out of range",
    "--kv-cache-memory-bytes 0": "--kv-cache-memory-bytes 0 is out of range",
    "--max-num-seqs 99999999999999999999": "--max-num-seqs 99999999999999999999 is out of range",
    "--raw --system x": "--system needs the chat template",
    "--logprobs 2": "--logprobs shows in the JSON document alone",
    "--prompts-file x": "PROMPT and --prompts-file were both given",
}


@pytest.mark.parametrize(("flags", "message"), BAD.items(), ids=BAD.keys())
def test_nonsense_is_one_line_and_a_hint_before_the_model_loads(
    shell: Shell, flags: str, message: str
) -> None:
    assert shell("generate", "m", "Hi", *flags.split()) == 2
    error, hint = shell.err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")
    assert shell.out == ""
    assert shell.engines == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("max_tokens=0 is out of range", "--max-tokens 0 is out of range"),
        ("raise max_model_len", "raise --max-model-len"),
        ("the head drafts num_speculative_tokens=20", "the head drafts --spec-tokens 20"),
        ("a temperature above 0, or n=1", "a temperature above 0, or --n 1"),
        ("data.max_tokens and run.device='x'", "data.max_tokens and run.device='x'"),
        ("--max-tokens 3, my_max_tokens", "--max-tokens 3, my_max_tokens"),
    ],
)
def test_keys_of_a_config_are_flags_on_the_command_line(text: str, shown: str) -> None:
    assert in_flags(text) == shown


def test_no_prompt_is_an_error(shell: Shell) -> None:
    assert shell("generate", "m") == 2
    assert "no prompt was given" in shell.err


def test_missing_prompts_file_is_an_error(shell: Shell) -> None:
    assert shell("generate", "m", "--prompts-file", "/nonexistent") == 2
    assert "cannot read --prompts-file /nonexistent" in shell.err
