"""A server of our own starts, is told what it needs, says why it died, and never outlives us."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peagle.errors import DataError, ModelError
from peagle.http import is_healthy
from peagle.train.features.vllm_features import Workers
from peagle.train.features.vllm_server import RequiredStates, ServerPlan, VllmServer, make_room
from peagle.train.recipe import VllmSection
from tests.tiny.models import DEEP

# Answers /health, and has a child of its own, as vLLM has its engine, that will not be asked.
HEALTHY = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
signal.signal(signal.SIGTERM, signal.SIG_DFL)
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
port = int([a for a in sys.argv if a.startswith("--port=")][0].split("=")[1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DYING = "import sys; print('loading'); sys.exit('ValueError: no such model')"


def plan(root: Path, code: str = "") -> ServerPlan:
    return ServerPlan(
        model=Path("/models/big"),
        layer_ids=(2, 30, 57, 60),
        root=root,
        max_model_len=4097,
        max_positions=8192,
        dtype="bfloat16",
        num_requests=64,
        on_gpu=True,
        command=f"{sys.executable} -c {shlex.quote(code)}",
    )


def value_of(arguments: list[str], flag: str) -> str:
    (found,) = [a.removeprefix(f"{flag}=") for a in arguments if a.startswith(f"{flag}=")]
    return found


def test_vllm_is_told_to_extract_the_aux_layers_and_the_last_without_prefix_caching() -> None:
    arguments = plan(Path("/states")).arguments()
    speculative = json.loads(value_of(arguments, "--speculative-config"))
    assert speculative["method"] == "extract_hidden_states"
    layers = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == [2, 30, 57, 60]
    transfer = json.loads(value_of(arguments, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "ExampleHiddenStatesConnector"
    written_to = transfer["kv_connector_extra_config"]["shared_storage_path"]
    assert written_to == "/states/layers-2-30-57-60"
    assert "--no-enable-prefix-caching" in arguments
    assert value_of(arguments, "--max-model-len") == "4097"


def test_the_users_own_flags_come_last_and_the_command_runs_in_a_shell() -> None:
    chosen = replace(plan(Path("/s")), args=("--tensor-parallel-size=8",), command="vllm serve")
    assert chosen.arguments()[-1] == "--tensor-parallel-size=8"
    assert shlex.split(chosen.shell_command()) == chosen.arguments()
    with_devices = replace(chosen, devices="4,5", max_positions=4096).shell_command()
    assert with_devices.startswith("CUDA_VISIBLE_DEVICES=4,5 VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm")


def test_on_a_cpu_our_connector_alone_is_on_vllms_path() -> None:
    on_cpu = replace(plan(Path("/s")), on_gpu=False)
    transfer = json.loads(value_of(on_cpu.arguments(), "--kv-transfer-config"))
    folder = Path(on_cpu.variables()["PYTHONPATH"].split(os.pathsep)[0])
    module = folder / f"{transfer['kv_connector_module_path']}.py"
    assert f"class {transfer['kv_connector']}(" in module.read_text()
    assert [f.name for f in folder.glob("*.py")] == [module.name]  # nothing to shadow a package
    assert "PYTHONPATH" not in plan(Path("/s")).variables()


@pytest.mark.slow
def test_closing_ends_the_server_with_its_children_and_deletes_its_folder(tmp_path: Path) -> None:
    root = tmp_path / "states"
    root.mkdir()
    server = VllmServer(plan(root, HEALTHY), tmp_path / "vllm.log", timeout=30)
    child = int(server.log.read_text().split()[1])
    server.still_alive()
    assert is_running(child)
    server.close()
    assert not is_healthy(f"{server.url}/health")
    assert not is_running(child)
    assert not root.exists()
    with pytest.raises(ModelError, match="vLLM exited"):
        server.still_alive()


@pytest.mark.slow
def test_a_killed_trainer_takes_its_server_along(tmp_path: Path) -> None:
    root, log = tmp_path / "states", tmp_path / "vllm.log"
    root.mkdir()
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(root), str(log), HEALTHY], stdout=subprocess.PIPE
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"serving\n"
    child = int(log.read_text().split()[1])
    assert is_running(child)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not is_running(child) and not root.exists())


TRAINER = """
import shlex, sys, time
from pathlib import Path
from peagle.train.features.vllm_server import ServerPlan, VllmServer
root, log, code = sys.argv[1:]
plan = ServerPlan(
    model=Path("m"), layer_ids=(1,), root=Path(root), max_model_len=8, max_positions=8,
    dtype="float32", num_requests=1, on_gpu=True,
    command=f"{sys.executable} -c {shlex.quote(code)}",
)
server = VllmServer(plan, Path(log), timeout=30)
print("serving", flush=True)
time.sleep(600)
"""


def is_running(process: int) -> bool:
    """Not gone, and not a zombie that nobody has collected yet."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_that_dies_is_quoted_and_one_that_is_slow_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ValueError: no such model"):
        VllmServer(plan(tmp_path / "a", DYING), tmp_path / "a.log", timeout=30)
    with pytest.raises(ModelError, match="not ready after"):
        VllmServer(
            plan(tmp_path / "b", "import time; time.sleep(60)"), tmp_path / "b.log", timeout=1
        )
    missing = replace(plan(tmp_path / "c"), command="no-such-vllm serve")
    with pytest.raises(ModelError, match="no-such-vllm"):
        VllmServer(missing, tmp_path / "c.log", timeout=30)


def need(longest: int) -> RequiredStates:
    return RequiredStates("tiny", DEEP.make_target().config, (2, 3, 5), longest, torch.float64)


def test_no_more_documents_are_in_flight_than_the_folder_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = need(100).document_bytes
    assert one == 100 * 4 * 16 * 8
    usage = type("Usage", (), {"free": 10 * one})
    monkeypatch.setattr("peagle.train.features.vllm_server.shutil.disk_usage", lambda name: usage)
    section = VllmSection(folder=str(tmp_path), requests=64)
    folder, num_requests = make_room(section, need(100))
    assert (folder.parent, num_requests) == (tmp_path, 5)
    assert make_room(section, need(5))[1] == 64
    with pytest.raises(DataError, match="more than half"):
        make_room(section, need(1000))


def test_what_waits_for_a_worker_is_cancelled_when_they_close() -> None:
    workers, begun, go = Workers(1, "test"), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go.wait(10)

    running, waiting = workers.submit(slow), workers.submit(lambda: None)
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    workers.close()
    running.result(0)
    with pytest.raises(CancelledError):
        waiting.result(0)
