"""The real vLLM takes our lines, serves our head, stops when told, and its death is explained."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from peagle.backends.vllm.arguments import build_command
from peagle.backends.vllm.options import VllmOptions
from peagle.backends.vllm.released import released_models
from peagle.cli.main import main
from tests.backends.fake_vllm import free_port, is_running

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SMOLLM = {"model": "smollm2-135m-p-eagle", "num_speculative_tokens": 5}
SMALL = ("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "2", "--enforce-eager")
MEMORY = ("--gpu-memory-utilization", "0.15")  # of the machine's, on a CPU
SECONDS = 400


@pytest.fixture(scope="module")
def parse() -> Callable[[str], Any]:
    """What `vllm serve` makes of a line, by its own parser."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return lambda line: parser.parse_args(shlex.split(line)[2:])


@pytest.mark.parametrize("name", [*released_models(), "smollm2-135m"])
def test_vllm_s_own_parser_takes_our_lines(
    parse: Callable[[str], Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    released = released_models().get(name)
    several = ("--tensor-parallel-size", "4") if released else ()  # GPUs
    drafter = () if released else ("--speculative-config", json.dumps(SMOLLM))
    printed = ("serve", name, "--backend", "vllm", "--print-command", *several, *drafter)
    assert main(list(printed)) == 0
    parsed = parse(capsys.readouterr().out)
    assert parsed.speculative_config["parallel_drafting"] is True
    tokens = parsed.speculative_config["num_speculative_tokens"]
    assert parsed.max_cudagraph_capture_size >= 2 * tokens * parsed.max_num_seqs
    if released is not None:
        assert parsed.model_tag == released.target
        assert parsed.speculative_config["model"] == released.head
        assert tokens == released.num_speculative_tokens
        for option, value in {**released.options.given(), "tensor_parallel_size": 4}.items():
            assert getattr(parsed, option) == value, option


def test_every_option_reaches_vllm_under_its_name(parse: Callable[[str], Any]) -> None:
    values: dict[str, Any] = {"dtype": "float32", "quantization": "fp8", "kv_cache_dtype": "fp8"}
    values["block_size"] = 16
    for name, kind in get_type_hints(VllmOptions).items():
        value = values.get(name, False if kind == bool | None else 1)
        options = VllmOptions(**{name: value})
        parsed = parse(build_command("org/m", drafter={}, options=options).line)
        assert getattr(parsed, name) == value, name


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1",
        "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless",
        "--distributed-executor-backend ray",
        "--data-parallel-size-local 1 --data-parallel-address 10.0.0.1",
        "--data-parallel-size-local 1 --data-parallel-start-rank 1 --data-parallel-address 10.0.0.1"
        " --headless",
    ],
)
def test_the_documented_words_for_several_nodes_exist(
    parse: Callable[[str], Any], line: str
) -> None:
    options = VllmOptions(tensor_parallel_size=8, data_parallel_size=2)
    words = shlex.split(line)
    parsed = parse(build_command("org/m", drafter={}, options=options, extra=words).line)
    assert (parsed.tensor_parallel_size, parsed.data_parallel_size) == (8, 2)
    for flag, value in pairwise([*words, "--"]):
        if flag.startswith("--"):
            expected = "True" if value.startswith("--") else value
            assert str(getattr(parsed, flag[2:].replace("-", "_"))) == expected


def _start(port: int, *args: str) -> subprocess.Popen[str]:
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    code = "from peagle.__main__ import run; run()"
    base = ("serve", "smollm2-135m", "--backend", "vllm", "--port", str(port))
    return subprocess.Popen(
        [sys.executable, "-c", code, *base, *SMALL, *args],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stderr is not None
    yield from process.stderr


def _group_of(port: int) -> list[int]:
    """All processes of the session whose leader serves that port."""
    leaders = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _serves(entry, port)
    ]
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _session(int(entry.name)) in leaders
    ]


def _serves(entry: Path, port: int) -> bool:
    try:
        words = (entry / "cmdline").read_text().split("\0")
    except OSError:
        return False
    return "peagle.cli.main" not in " ".join(words) and str(port) in words


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


@pytest.mark.network
def test_a_head_of_ours_is_served_and_stopped() -> None:
    port = free_port()
    drafter = ("--spec-model", "smollm2-135m-p-eagle", "--spec-tokens", "5")
    process = _start(port, *MEMORY, *drafter)
    log = []
    for line in _lines(process):
        log.append(line)
        if line.startswith(("ready: ", "error: ")):
            break
    assert log[-1] == f"ready: http://127.0.0.1:{port}/v1\n", log[-20:]

    answer = _complete(port, "The capital of France is")
    assert " Paris" in answer["choices"][0]["text"]
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    drafted = [m for m in metrics.splitlines() if m.startswith("vllm:spec_decode_num_drafts_total")]
    assert drafted
    assert float(drafted[0].split()[-1]) > 0

    pids = _group_of(port)
    assert len(pids) >= 2  # the server and its engine
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert [pid for pid in pids if is_running(pid)] == []


def _complete(port: int, prompt: str) -> dict[str, Any]:
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


@pytest.mark.network
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--quantization", "bogus"), "Unknown quantization method: bogus"),
        (("--", "--no-such-flag"), "unrecognized arguments: --no-such-flag"),
    ],
)
def test_vllm_dying_at_its_start_is_explained_in_its_own_words(
    args: tuple[str, ...], words: str
) -> None:
    process = _start(free_port(), *MEMORY, *args)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    error, hint = err.splitlines()[-2:]
    assert error.startswith(f"error: vLLM died at its start: {words}")
    assert hint.startswith("hint: ")
