"""Requests to an endpoint, signed; answers at once or as a stream.

The container has one route: a body with `messages` is a chat, one with `prompt` a completion.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

from peagle.deploy.aws import find_regions, find_session, without_secrets
from peagle.errors import ConfigError
from peagle.http import Endpoint, LostError, RefusedError, error_message, server_sent

CONNECTIONS = 512  # requests at once
TIMEOUT = 600.0  # seconds without a byte
JSON = "application/json"


def find_runtime(reference: str) -> EndpointRuntime:
    """NAME or REGION/NAME."""
    region, _, name = reference.rpartition("/")
    if not name:
        raise ConfigError("no endpoint is named", hint="write sagemaker:ENDPOINT")
    return EndpointRuntime(name, find_regions(region or None)[0])


class EndpointRuntime:
    """One endpoint. Callable from many threads; raises RefusedError or LostError."""

    def __init__(self, name: str, region: str) -> None:
        session = find_session(region)  # says it where boto3 is missing
        from botocore.config import Config

        self.name = name
        config = Config(
            retries={"total_max_attempts": 1},  # a repeated request would be measured as one
            max_pool_connections=CONNECTIONS,
            read_timeout=TIMEOUT,
        )
        self._client = session.client("sagemaker-runtime", config=config)

    @property
    def endpoint(self) -> Endpoint:
        """As bench knows endpoints: vLLM, whose model needs no name."""
        base = self._client.meta.endpoint_url
        return Endpoint(f"{base}/endpoints/{self.name}", shows_token_ids=True)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        with _answering():
            answer = self._client.invoke_endpoint(**self._request(body))
            content: bytes = answer["Body"].read()
            return content

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        with _answering():
            answer = self._client.invoke_endpoint_with_response_stream(**self._request(body))
            with closing(answer["Body"]) as stream:
                yield from server_sent(_payloads(stream))

    def _request(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "EndpointName": self.name,
            "ContentType": JSON,
            "Accept": JSON,
            "Body": json.dumps(body).encode(),
        }


def _payloads(stream: Any) -> Iterator[bytes]:
    for event in stream:
        if "PayloadPart" in event:
            yield event["PayloadPart"]["Bytes"]


@contextmanager
def _answering() -> Iterator[None]:
    """SageMaker's errors and those of the container behind it, as those of any model server."""
    from botocore.exceptions import ClientError, EventStreamError, HTTPClientError

    try:
        yield
    except EventStreamError as error:
        raise LostError(without_secrets(str(error))) from None
    except ClientError as error:
        raise _refused(error.response) from None
    except HTTPClientError as error:  # among them connections that cannot be made or break off
        raise LostError(str(error)) from None


def _refused(response: dict[str, Any]) -> RefusedError:
    said = response.get("Error", {})
    code, message = str(said.get("Code", "")), str(said.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500))
    if code == "ModelError":  # the container's own answer
        status = int(response.get("OriginalStatusCode", status))
        message = error_message(str(response.get("OriginalMessage", message)).encode())
    elif "not found" in message.lower():
        status = 404
    elif "Throttling" in code:
        status = 429
    return RefusedError(status, without_secrets(f"{code}: {message}"))
