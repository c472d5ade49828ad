"""Keys, limits, headers and errors: what a client may do, and what it learns when it may not."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from peagle.errors import ConfigError, RequestError
from peagle.server.config import ServerConfig, read_api_key
from peagle.server.guards import JsonLines
from peagle.server.protocol import ChatCompletionRequest, CompletionRequest
from peagle.server.serving import HeadWithBody, listen

from .conftest import make_llm
from .running import PATIENCE, RunningServer, running_server, wait_for

SECRET = "a prompt that nobody else may read"
KEY = "secret-key"


@pytest.fixture(scope="module")
def guarded(model_folder: Path, head_folder: Path) -> Iterator[RunningServer]:
    options: dict[str, Any] = {"max_body_bytes": 20_000, "max_n": 4, "max_stop_strings": 2}
    options |= {"log_requests": True, "allowed_origins": ("https://page.example",)}
    options |= {"max_waiting_requests": 2, "request_timeout": 30.0}
    with running_server(
        lambda: make_llm(model_folder, head_folder, max_num_seqs=2), api_key=KEY, **options
    ) as made:
        yield made


def test_the_key_opens_everything_and_nothing_else_does(guarded: RunningServer) -> None:
    with httpx.Client(base_url=guarded.url) as stranger, guarded.client() as client:
        for wrong in ({}, {"Authorization": "Bearer secret-kez"}, {"Authorization": KEY}):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
                answer = stranger.get(path, headers=wrong)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/", "/health", "/version"):
            assert stranger.get(path).status_code == 200
        for path in ("/", "/health"):  # as checks ask that want no body
            assert stranger.head(path).status_code == 200
        assert client.get("/v1/models").status_code == 200
        lower = {"Authorization": f"bearer {KEY}"}  # the scheme's case does not matter
        assert stranger.get("/v1/models", headers=lower).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[" * 10_000, 400, "body"),
        (b'{"prompt": "' + b"a" * 30_000 + b'"}', 413, "20000 bytes"),
        ({"prompt": "a", "n": 5}, 400, "n is 5"),
        ({"prompt": ["a"] * 5}, 400, "5 answers"),
        ({"prompt": "a", "stop": ["a", "b", "c"]}, 400, "stop"),
        ({"prompt": "a", "stop": "x" * 2000}, 400, "stop"),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"9999": 1}}, 400, "vocabulary"),
        ({"prompt": "a", "seed": 1 << 70}, 400, "seed"),
        ({"prompt": "a", "temperature": "1"}, 400, "temperature"),
        ({"prompt": ["a", 1]}, 400, "prompt.1"),
        ({"prompt": "a", **{f"k{n}": 1 for n in range(1001)}}, 400, "1001 places"),
        ({"prompt": "a", "top_p": 1e-300}, 400, "top_p"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [[]]}, 400, "empty"),
        ({"prompt": "\ud800"}, 400, "Unicode"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ({"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, 400, "more than once"),
        ({"prompt": "a", "structured_outputs": {}}, 400, "exactly one"),
        ({"prompt": "a", "guided_grammar": "x" * 19_000}, 400, ""),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(
    guarded: RunningServer, body: Any, status: int, named: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body)
    with guarded.client() as client:
        answer = client.post(
            "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert named in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500
    guarded.wait_until_idle()


def test_a_long_list_of_wrong_items_is_one_error_for_each_kind_that_it_could_be() -> None:
    """To tell each takes half a minute, in which nobody else is answered, and 3 GB."""
    for wrong in ([1.5] * 10_000, [[1.5]] * 10_000):
        with pytest.raises(ValidationError) as caught:
            CompletionRequest.model_validate_json(json.dumps({"prompt": wrong, "stop": wrong}))
        assert caught.value.error_count() < 10
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate_json(json.dumps({"messages": [{}] * 10_000}))
    assert caught.value.error_count() == 1


def test_an_error_names_the_place_and_not_the_kinds_that_a_value_may_be_of(
    guarded: RunningServer,
) -> None:
    image = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    body = {"messages": [{"role": "user", "content": image}]}
    with guarded.client() as client:
        error = client.post("/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == "messages.0.content.1.type"
        assert "'text'" in error["message"]
        long = {"prompt": "a", "metadata": {SECRET * 100: 1}}
        assert SECRET not in client.post("/v1/completions", json=long).text


def test_a_body_in_pieces_is_limited_too(guarded: RunningServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(40):
            yield b"a" * 1000

    with guarded.client() as client:
        answer = client.post(
            "/v1/completions", content=pieces(), headers={"Content-Type": "application/json"}
        )
    assert answer.status_code == 413


def test_a_body_that_comes_too_slowly_is_408(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.server.guards.BODY_SECONDS", 0.05)
    with socket.create_connection(address(guarded), timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer " + KEY.encode() + b"\r\nContent-Length: 50\r\n\r\n{"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "sent", [[b""], [b"GET /health"], [b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /"]]
)
def test_a_connection_without_a_whole_request_is_closed(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch, sent: list[bytes]
) -> None:
    monkeypatch.setattr("peagle.server.serving.KEEP_ALIVE", 0.1)
    with socket.create_connection(address(guarded), timeout=10) as connection:
        connection.sendall(sent[0])
        for piece in sent[1:]:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
            connection.sendall(piece)
        while connection.recv(4096):
            pass


@pytest.mark.parametrize(
    "piece", [b"GET /health HTTP/1.1\r\nX: ", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"]
)
def test_a_head_without_an_end_is_not_gathered(guarded: RunningServer, piece: bytes) -> None:
    endless = piece + (b"a" * 1000 + b": b\r\n") * 32_000
    with (
        socket.create_connection(address(guarded), timeout=PATIENCE) as connection,
        pytest.raises(OSError, match=r"reset|Broken pipe"),
    ):
        connection.sendall(endless)


def test_a_body_of_very_short_pieces_is_read(guarded: RunningServer) -> None:
    content = json.dumps({"prompt": "a", "max_tokens": 1, "user": "b" * 18_000}).encode()
    pieces = (content[at : at + 1] for at in range(len(content)))
    with guarded.client() as client:
        answer = client.post(
            "/v1/completions", content=pieces, headers={"Content-Type": "application/json"}
        )
    assert answer.status_code == 200


def test_a_client_that_goes_while_it_sends_is_no_mistake_of_ours(
    guarded: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), socket.create_connection(address(guarded)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer " + KEY.encode() + b"\r\nContent-Length: 50\r\n\r\n{"
        )
        connection.close()
        wait_for(lambda: '"status": 499' in caplog.text)
    assert "Traceback" not in caplog.text


def test_a_client_that_does_not_read_loses_its_connection(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.server.serving.STALLED", 1)
    with listen("127.0.0.1", 0) as listener, socket.socket() as client:
        listener.listen()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.settimeout(PATIENCE)
        with accepted, pytest.raises(TimeoutError, match="Connection timed out"):
            accepted.sendall(bytes(100_000_000))


def address(running: RunningServer) -> tuple[str, int]:
    url = httpx.URL(running.url)
    assert url.port is not None
    return url.host, url.port


def test_too_many_prompts_are_refused_before_they_are_read(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(text: str, add_special_tokens: bool) -> Any:
        raise AssertionError("it was read")

    monkeypatch.setattr(guarded.service.renderer, "encode", fail)
    with guarded.client() as client:
        for prompt in (["a"] * 5, [[1]] * 5):
            answer = client.post("/v1/completions", json={"prompt": prompt})
            assert answer.status_code == 400
        ids = client.post("/v1/completions", json={"prompt": [1] * 5, "max_tokens": 1})
        assert ids.status_code == 200


def test_only_json_is_read_so_that_forms_of_other_sites_do_nothing(guarded: RunningServer) -> None:
    with guarded.client() as client:
        content = json.dumps({"prompt": "a", "max_tokens": 1})
        answer = client.post(
            "/v1/completions", content=content, headers={"Content-Type": "text/plain"}
        )
    assert answer.status_code in (400, 415)


def test_neither_errors_nor_logs_hold_text_of_a_prompt(
    guarded: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": SECRET, "n": "many"},
        {"prompt": [SECRET, 1]},
        {"prompt": SECRET, "max_tokens": 2},
        {"prompt": SECRET * 16, "max_tokens": 2},
        {"prompt": SECRET, "stop": [SECRET, ""], "max_tokens": 2},
    ]
    with caplog.at_level(logging.DEBUG), guarded.client() as client:
        for body in bodies:
            answer = client.post("/v1/completions", json=body)
            assert SECRET not in answer.text
        chat = {"messages": [{"role": SECRET, "content": SECRET}]}
        assert SECRET not in client.post("/v1/chat/completions", json=chat).text
        assert client.get(f"/{SECRET}").status_code == 404
        wait_for(lambda: caplog.text.count('"event": "request"') >= len(bodies) + 2)
    assert SECRET not in caplog.text
    assert str(guarded.llm.model_path) not in caplog.text


def test_a_log_line_has_the_request_s_id_and_figures(
    guarded: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "peagle.server"), guarded.client() as client:
        headers = {"X-Request-Id": "my-id.7"}
        body = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "my-id.7"
        strange = client.get("/health", headers={"X-Request-Id": "a b\u00e9".encode("latin-1")})
        assert strange.headers["x-request-id"].isalnum()
        # Lines of earlier tests' requests may come late: a line is written after its answer.
        wait_for(lambda: "my-id.7" in caplog.text)
    (record,) = [r for r in caplog.records if "my-id.7" in r.getMessage()]
    line = json.loads(JsonLines().format(record))
    assert (line["request_id"], line["status"], line["completion_tokens"]) == ("my-id.7", 200, 3)
    assert line["path"] == "/v1/completions"


def test_answers_carry_security_headers(guarded: RunningServer) -> None:
    with guarded.client() as client:
        for path in ("/", "/health", "/nowhere", "/v1/models"):
            headers = client.get(path).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "server" not in headers


def test_only_named_origins_may_call(guarded: RunningServer, server: RunningServer) -> None:
    def allowed(running: RunningServer, origin: str) -> str | None:
        with running.client() as client:
            return client.get("/health", headers={"Origin": origin}).headers.get(
                "access-control-allow-origin"
            )

    assert allowed(guarded, "https://page.example") == "https://page.example"
    assert allowed(guarded, "https://other.example") is None
    assert allowed(server, "https://page.example") is None


def test_a_browser_may_ask_without_the_key_what_it_may_send(guarded: RunningServer) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    headers |= {"Access-Control-Request-Headers": "authorization"}
    with httpx.Client(base_url=guarded.url) as stranger:
        answer = stranger.options("/v1/completions", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-headers"] == "authorization"
        assert stranger.post("/v1/completions", headers=headers).status_code == 401


def test_a_local_server_answers_to_local_names_alone(server: RunningServer) -> None:
    with server.client() as client:
        assert client.get("/health", headers={"Host": "rebound.example:8000"}).status_code == 403
        for name in ("192.0.2.1:80", "127.0.0.1.example", "[2001:db8::1]", "", "[", ":80"):
            assert client.get("/health", headers={"Host": name}).status_code == 403
        for name in ("localhost", "127.0.0.1:80", "127.0.0.2", "[::1]:8000", "[::1]"):
            assert client.get("/health", headers={"Host": name}).status_code == 200


def test_a_full_queue_is_429_with_a_time_to_come_back(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two run, two wait. More answers than that at once never find room."""
    long = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with guarded.client() as client:
        streams = [client.stream("POST", "/v1/completions", json=long) for _ in range(2)]
        entered = [stream.__enter__() for stream in streams]
        answer = client.post("/v1/completions", json={"prompt": "a", "n": 3, "max_tokens": 1})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        never = {"prompt": ["a", "a"], "n": 2, "max_tokens": 1}
        monkeypatch.setattr(guarded.service.llm, "_max_waiting", 1)
        assert client.post("/v1/completions", json=never).status_code == 400
        for stream, response in zip(streams, entered, strict=True):
            response.close()
            stream.__exit__(None, None, None)
    guarded.wait_until_idle()


def test_an_answer_that_takes_too_long_is_504(model_folder: Path, head_folder: Path) -> None:
    with (
        running_server(lambda: make_llm(model_folder, head_folder), request_timeout=0.05) as slow,
        slow.client() as client,
    ):
        body: dict[str, Any] = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 504
        text = client.post("/v1/completions", json=body | {"stream": True}).text
        assert '"timeout_error"' in text
        slow.wait_until_idle()


def test_an_engine_that_stops_fails_its_requests_and_is_not_healthy(
    model_folder: Path, head_folder: Path
) -> None:
    with (
        running_server(lambda: make_llm(model_folder, head_folder)) as broken,
        broken.client() as client,
    ):
        assert client.get("/health").status_code == 200

        def fail() -> Any:
            raise RequestError("the engine of this test is broken")

        broken.llm.step = fail
        answer = client.post("/v1/completions", json={"prompt": "abc"})
        assert answer.status_code == 500
        assert "broken" not in answer.text
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 503


def test_keys_come_from_one_place(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\nrest\n")
    assert read_api_key(ServerConfig(), None) is None
    assert read_api_key(ServerConfig(), "variable") == "variable"
    assert read_api_key(ServerConfig(api_key="flag"), "variable") == "flag"
    assert read_api_key(ServerConfig(api_key_file=file), "variable") == "from-file"
    for wrong in (
        ServerConfig(api_key="a", api_key_file=file),
        ServerConfig(api_key=""),
        ServerConfig(api_key="é"),
        ServerConfig(api_key_file=tmp_path / "none"),
    ):
        with pytest.raises(ConfigError):
            read_api_key(wrong, None)


def test_connections_send_at_once() -> None:
    """Nagle's algorithm would hold a second piece back until the client has acknowledged the
    first, which it does late."""
    with listen("127.0.0.1", 0) as listener, socket.socket() as client:
        listener.listen()
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class Sent:
    """A transport that remembers what was written, packet by packet."""

    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.packets.append(data)

    def close(self) -> None:
        self.is_closed = True


def test_the_head_of_an_answer_goes_with_its_body_and_alone_where_there_is_none() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"

    async def send() -> list[bytes]:
        loop, sent = asyncio.get_running_loop(), Sent()
        transport = HeadWithBody(sent, loop)  # type: ignore[arg-type]
        for data in (head, b"first", b"second", head, b"third", head):
            transport.write(data)
        await asyncio.sleep(0)
        transport.write(head)
        transport.close()
        assert sent.is_closed
        return sent.packets

    assert asyncio.run(send()) == [head + b"first", b"second", head + b"third", head, head]
