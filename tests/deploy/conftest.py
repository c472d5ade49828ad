"""moto's server behind a proxy, and command lines against it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.main import main
from peagle.deploy import endpoints
from tests.tiny.folders import write_head, write_model

from .aws_proxy import Behaviour, serving

REGION = "us-east-1"
ROLE = "arn:aws:iam::123456789012:role/sagemaker"
SECRET = "wJalrXUtnFEMI"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": REGION,
}
ISOLATION = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "HF_HUB_OFFLINE": "1",
}
UP = ("deploy", "sagemaker", "up", "gpt-oss-20b", "--name", "oss", "--role", ROLE)


@dataclass
class Account:
    """An AWS account, and a shell that has its credentials."""

    url: str
    behaviour: Behaviour
    capsys: pytest.CaptureFixture[str]
    out: str = ""
    err: str = ""
    clients: dict[tuple[str, str], Any] = field(default_factory=dict)

    def __call__(self, *words: str) -> int:
        """Runs one command line in this process."""
        code = main(list(words))
        self.out, self.err = self.capsys.readouterr()
        assert SECRET not in self.out + self.err
        return code

    def verb(self, *words: str) -> int:
        return self("deploy", "sagemaker", *words)

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The same in a process of its own."""
        command = [sys.executable, "-m", "peagle", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)

    def client(self, service: str, region: str = REGION) -> Any:
        import boto3

        if (service, region) not in self.clients:
            self.clients[service, region] = boto3.client(service, region_name=region)
        return self.clients[service, region]

    def log(self, *lines: str, name: str = "oss", stream: str = "AllTraffic/i-1") -> None:
        """What a container of the endpoint says."""
        logs, group = self.client("logs"), f"/aws/sagemaker/Endpoints/{name}"
        with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
            logs.create_log_group(logGroupName=group)
        with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
            logs.create_log_stream(logGroupName=group, logStreamName=stream)
        now = int(time.time() * 1000)
        events = [{"timestamp": now + n, "message": line} for n, line in enumerate(lines)]
        logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)

    def left(self, region: str = REGION) -> dict[str, list[str]]:
        """Names of all that is there."""
        sagemaker = self.client("sagemaker", region)
        return {
            "model": [m["ModelName"] for m in sagemaker.list_models()["Models"]],
            "endpoint_config": [
                c["EndpointConfigName"]
                for c in sagemaker.list_endpoint_configs()["EndpointConfigs"]
            ],
            "endpoint": [e["EndpointName"] for e in sagemaker.list_endpoints()["Endpoints"]],
        }


NOTHING: dict[str, list[str]] = {"model": [], "endpoint_config": [], "endpoint": []}


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    import botocore.loaders
    import botocore.session
    from moto.sagemaker.models import FakeEndpointConfig
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        # The model of SageMaker's API takes a third of a second to read, and each session reads it.
        loader = botocore.loaders.create_loader()
        patch.setattr(botocore.session, "create_loader", lambda *_: loader)
        # moto knows the instance types of 2020; botocore knows today's.
        patch.setattr(FakeEndpointConfig, "validate_instance_type", _validate_instance_type)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


def _validate_instance_type(config: object, instance_type: str) -> None:
    from moto.sagemaker.exceptions import ValidationError

    if instance_type not in instance_types():
        raise ValidationError(
            f"Value '{instance_type}' at 'instanceType' failed to satisfy constraint: "
            f"Member must satisfy enum value set: {instance_types()}"
        )


@functools.cache
def instance_types() -> tuple[str, ...]:
    """Those of endpoints, by botocore's model of the API."""
    import botocore.session

    model = botocore.session.get_session().get_service_model("sagemaker")
    return tuple(model.shape_for("ProductionVariantInstanceType").enum)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No account: neither credentials nor a region."""
    for name in (*CREDENTIALS, "AWS_DEFAULT_REGION", "AWS_PROFILE", "HF_TOKEN", "PEAGLE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ISOLATION.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def aws(
    moto: str,
    alone: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Account]:
    urllib.request.urlopen(f"{moto}/moto-api/reset", data=b"").close()
    behaviour = Behaviour()
    with serving(behaviour, moto) as url:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(endpoints, "POLL_SECONDS", 0.01)
        yield Account(url, behaviour, capsys)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("deploy") / "tiny-model", vocab_size=280))


@pytest.fixture(scope="session")
def head(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("deploy") / "tiny-p-eagle"
    layers = {"aux_hidden_state_layer_ids": (2, 3, 4)}
    return str(write_head(folder, Path(model), **layers))
