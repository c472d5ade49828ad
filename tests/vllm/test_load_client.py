"""vLLM's own load client, unmodified, on our server: `vllm bench serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.fake_vllm import free_port
from tests.vllm.released_head import write_released_head, write_target

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SECONDS = 300
NUM_REQUESTS, NUM_TOKENS = 12, 24
# What the command does. Its own name dies in builds that are not called "vllm" on the index.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def url(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two API servers."""
    head = write_released_head(tmp_path_factory.mktemp("heads") / "head", target)
    port = free_port()
    words = [sys.executable, "-m", "peagle", "serve", str(target), "--spec-model", str(head)]
    words += ["--port", str(port), "--device", "cpu", "--api-server-count", "2"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = ""
        for line in process.stderr:
            if line.startswith("ready: "):
                break
        assert line.startswith("ready: "), line
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_s_load_client_gets_every_token_it_asks_for(
    target: Path, url: str, backend: str, tmp_path: Path
) -> None:
    path = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    words = ["--backend", backend, "--base-url", url, "--endpoint", path, "--ignore-eos"]
    words += ["--model", "target", "--tokenizer", str(target), "--dataset-name", "random"]
    words += ["--random-input-len", "16", "--random-output-len", str(NUM_TOKENS)]
    words += ["--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "4", "--disable-tqdm"]
    words += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    subprocess.run(
        [sys.executable, "-c", BENCH_SERVE, *words],
        check=True,
        timeout=SECONDS,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0)
    assert result["total_output_tokens"] == NUM_REQUESTS * NUM_TOKENS
    assert result["mean_ttft_ms"] > 0
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        page = answer.read().decode()
    assert "vllm:spec_decode_num_drafts_total" in page
