"""Claim: no request that the server's own description allows, or nearly allows, is a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig

from .conftest import make_llm
from .running import RunningServer, running_server

# No shrinking: a failure is told with its request, however long, and the rest of the suite goes on.
SEARCH = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
ROUTES = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/health", "GET"),
    ("/version", "GET"),
    ("/metrics", "GET"),
]


@pytest.fixture(scope="module")
def server(model_folder: Path, head_folder: Path) -> Iterator[RunningServer]:
    """Its context is short: most of these requests set no limit to their answers."""
    with running_server(lambda: make_llm(model_folder, head_folder, max_model_len=48)) as running:
        yield running


def test_the_description_names_every_route(server: RunningServer) -> None:
    with server.client() as client:
        described = client.get("/openapi.json").json()["paths"]
    assert {(path, m.upper()) for path, methods in described.items() for m in methods} == {*ROUTES}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), ROUTES)
def test_no_request_is_a_server_error(server: RunningServer, path: str, method: str) -> None:
    schema = schemathesis.openapi.from_url(
        f"{server.url}/openapi.json", config=SchemathesisConfig()
    )
    operation = schema[path][method]

    @SEARCH
    @given(case=operation.as_strategy())
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=[not_a_server_error], timeout=60)

    check()
    server.wait_until_idle()
