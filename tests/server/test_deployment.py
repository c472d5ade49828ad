"""What the deployment files name is there: flags of `peagle serve`, metrics of the server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families

from peagle.cli.main import app

from .running import RunningServer

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"(?:vllm:|http_)\w+")


@pytest.fixture(scope="module")
def flags() -> set[str]:
    command: Any = typer.main.get_command(app)
    return {flag for parameter in command.commands["serve"].params for flag in parameter.opts}


def asked(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_containers_and_units_start_the_server_with_flags_that_it_has(flags: set[str]) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = compose["services"]["peagle"]
    commands = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    unit = (DEPLOY / "peagle.service").read_text()
    (start,) = re.findall(r"^ExecStart=\S+ serve (.*)$", unit, re.MULTILINE)
    lines = [service["command"], *(json.loads(line) for line in commands), shlex.split(start)]
    assert len(commands) == 2
    for words in lines:
        assert asked(words)
        assert asked(words) <= flags
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert {"cpu", "cuda"} <= {*stages}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Its program is none of this machine's."""
    unit = (DEPLOY / "peagle.service").read_text().replace("/opt/peagle/bin/peagle", sys.executable)
    (tmp_path / "peagle.service").write_text(unit)
    words = ["systemd-analyze", "verify", str(tmp_path / "peagle.service")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_copies_what_the_package_is_built_from() -> None:
    lines = re.findall(r"^COPY (.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    copied = {name for line in lines for name in line.split()}
    assert all((DEPLOY.parent / name).exists() for name in copied)
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "src", project["readme"], "LICENSE"} <= copied


def test_files_that_compose_mounts_are_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounts = [v.split(":")[0] for s in compose["services"].values() for v in s["volumes"]]
    mine = [mount for mount in mounts if mount.startswith("./")]
    assert mine
    assert all((DEPLOY / mount).exists() for mount in mine)


def test_the_dashboard_asks_for_metrics_that_the_server_has(server: RunningServer) -> None:
    with server.client() as client:
        body = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        page = client.get("/metrics").text
    known = {s.name for family in text_string_to_metric_families(page) for s in family.samples}
    dashboard = json.loads((DEPLOY / "grafana/dashboards/peagle.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    named = {name for query in queries for name in METRIC.findall(query)}
    assert len(named) > 10
    assert named <= known
