"""One client for every server: what is refused, what is tried again, and what a stream holds."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from peagle.errors import ConfigError
from peagle.http import Endpoint, HttpClient, LostError, RefusedError, is_healthy, retrying

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
QUICK = {"retries": 2, "first_wait": 0.0}


@contextmanager
def answering(*replies: bytes | None) -> Iterator[tuple[str, list[bytes]]]:
    """-> the address of a server that sends one reply per connection (None: hangs up), and the
    heads of the requests."""
    heads: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for reply in replies:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed by the test's end
                return
            with connection:
                heads.append(_read_request(connection))
                connection.sendall(reply or b"")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heads
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def _read_request(connection: socket.socket) -> bytes:
    """The head; the body is read too, or closing would reset the connection."""
    content = b""
    while b"\r\n\r\n" not in content and (piece := connection.recv(65536)):
        content += piece
    head, _, body = content.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head.lower())
    missing = int(found[1]) - len(body) if found else 0
    while missing > 0 and (piece := connection.recv(missing)):
        missing -= len(piece)
    return head + b"\r\n"


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://h", "http://", "http://h:99999", "http://[::1", ""]
)
def test_what_is_not_an_address_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address") as caught:
        Endpoint(url)
    assert "http://HOST:PORT" in str(caught.value.hint)


@pytest.mark.parametrize(
    "url", ["http://h:80", "http://h:80/", "http://h:80/v1", "http://h:80/v1/"]
)
def test_an_address_may_end_with_the_version_of_the_api(url: str) -> None:
    assert Endpoint(url).base_url == "http://h:80"
    assert Endpoint("http://h/models/a/v1").base_url == "http://h/models/a"


def test_the_key_goes_with_every_request_and_answers_are_asked_for_uncompressed() -> None:
    with answering(OK) as (url, heads), HttpClient(Endpoint(f"{url}/a/v1", api_key="k")) as http:
        assert http.get("/v1/models") == b"{}"
    assert heads[0].startswith(b"GET /a/v1/models HTTP/1.1\r\n")
    head = heads[0].lower()
    assert b"\r\nauthorization: bearer k\r\n" in head
    assert b"\r\naccept-encoding: identity\r\n" in head


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        HttpClient(Endpoint("http://h", api_key="k\u2026"))


@pytest.mark.parametrize("through_proxy", [True, False])
def test_no_proxy_stands_between_us_and_a_server_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, through_proxy: bool
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with answering(OK, OK) as (url, _):
        with HttpClient(Endpoint(url, through_proxy=through_proxy)) as http:
            assert http.get("/") == b"{}"
        assert is_healthy(url)


@pytest.mark.parametrize("through_proxy", [True, False])
def test_another_machine_is_reached_through_the_proxy_only_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, through_proxy: bool
) -> None:
    with answering(OK) as (proxy, heads):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        endpoint = Endpoint("http://server.invalid", through_proxy=through_proxy)
        with HttpClient(endpoint) as http:
            if through_proxy:
                assert http.get("/x") == b"{}"
            else:
                with pytest.raises(LostError):
                    http.get("/x")
    assert [head.split()[1] for head in heads] == [b"http://server.invalid/x"] * through_proxy


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "wrong"), (401, "fatal"), (404, "fatal"), (429, "temporary"), (503, "temporary")],
)
def test_refusals_say_whether_another_try_or_another_request_helps(status: int, kind: str) -> None:
    content = json.dumps({"error": {"message": "no"}}).encode()
    reply = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content)
    with (
        answering(reply) as (url, _),
        HttpClient(Endpoint(url)) as http,
        pytest.raises(RefusedError) as caught,
    ):
        http.post("/", {})
    error = caught.value
    assert str(error) == f"HTTP {status}: no"
    flags = {
        "wrong": error.is_wrong_request,
        "fatal": error.is_fatal,
        "temporary": error.is_temporary,
    }
    assert [name for name, holds in flags.items() if holds] == [kind]


def test_a_connection_that_the_server_closed_is_opened_again_once() -> None:
    with answering(None, OK) as (url, heads), HttpClient(Endpoint(url)) as http:
        assert http.get("/") == b"{}"
    assert len(heads) == 2
    with answering(None, None, OK) as (url, heads), HttpClient(Endpoint(url)) as http:
        with pytest.raises(LostError):
            http.get("/")
        assert len(heads) == 2


def test_a_busy_server_is_asked_again_and_given_up_after_the_last_retry() -> None:
    asked: list[int] = []
    failures: list[int] = []

    def ask(status: int, until: int) -> int:
        asked.append(status)
        if len(asked) < until:
            raise RefusedError(status, "busy")
        return len(asked)

    endpoint = Endpoint("http://h", **QUICK)
    assert retrying(lambda: ask(503, 3), endpoint, lambda: failures.append(1)) == 3
    assert len(failures) == 2
    asked.clear()
    with pytest.raises(RefusedError):
        retrying(lambda: ask(503, 4), endpoint)
    assert len(asked) == 3
    asked.clear()
    with pytest.raises(RefusedError):
        retrying(lambda: ask(400, 3), endpoint)
    assert len(asked) == 1


def test_a_streams_documents_are_whole_whatever_separators_their_texts_hold() -> None:
    texts = ["a\u2028b", "\x85", "\u2029", "\x0b\x0c\x1c", "ä"]
    reply = STREAM + b": comment\n\n" + b"".join(map(event, ({"t": t} for t in texts)))
    reply = reply.replace(b"\n\n", b"\r\n\r\n", 2) + b"data: [DONE]\n\n"
    with answering(reply) as (url, _), HttpClient(Endpoint(url)) as http:
        assert [document["t"] for document in http.events("/", {})] == texts


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (event({"t": 1}), "the answer broke off"),
        (event({"t": 1}) + b"data: {half\n\n", "holds no JSON"),
    ],
)
def test_a_stream_without_its_end_broke_off(content: bytes, words: str) -> None:
    with answering(STREAM + content) as (url, _), HttpClient(Endpoint(url)) as http:
        documents = http.events("/", {})
        assert next(documents) == {"t": 1}
        with pytest.raises(LostError, match=words):
            next(documents)


def test_an_error_inside_a_stream_is_a_refusal() -> None:
    reply = STREAM + event({"error": {"message": "engine died"}})
    with (
        answering(reply) as (url, _),
        HttpClient(Endpoint(url)) as http,
        pytest.raises(RefusedError, match="HTTP 500: engine died"),
    ):
        list(http.events("/", {}))
