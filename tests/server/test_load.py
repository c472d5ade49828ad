"""Claim: whatever clients do, nothing leaks, nothing breaks, and every answer is the one that its
request gets alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from peagle.engine.llm import LLM
from peagle.sampling_params import SamplingParams
from peagle.server.async_llm import Generation

from .conftest import make_llm
from .running import PATIENCE, RunningServer, running_server, wait_for

PROMPTS = ["abc", "the the", "a €é 😀 b", "x" * 150, "ab" * 90]
NUM_CLIENTS = 64
NUM_REQUESTS = 3  # of each client


def bodies(llm: LLM) -> list[dict[str, Any]]:
    made = []
    for number in range(15):
        body: dict[str, Any] = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 40}
        body |= {"seed": number, "ignore_eos": True, "stream": bool(number % 3)}
        if number % 4 == 1:
            body |= {"temperature": 0.0}
        if number % 5 == 2:
            text = text_alone(llm, body)
            body |= {"stop": [text[20:22], text[25]]}
            body |= {"speculative": {"num_speculative_tokens": number % 4}}
        made.append(body)
    return made


def text_alone(llm: LLM, body: dict[str, Any]) -> str:
    keys = ("max_tokens", "seed", "ignore_eos", "temperature", "stop")
    params = SamplingParams(**{key: body[key] for key in keys if key in body})
    return llm.generate(body["prompt"], params)[0].outputs[0].text


async def read_text(client: httpx.AsyncClient, body: dict[str, Any]) -> str | int:
    """The answer, or the status of a refusal."""
    answer = await client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        return answer.status_code
    if not body["stream"]:
        return str(answer.json()["choices"][0]["text"])
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    documents = [httpx.Response(200, content=line).json() for line in lines]
    return "".join(document["choices"][0]["text"] for document in documents)


async def misbehave(client: httpx.AsyncClient, body: dict[str, Any], how: int) -> int | None:
    """-> the status of a request that had to be refused."""
    if how == 0:  # goes away after some chunks
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                break
        return None
    if how == 1:  # goes away before or in the answer
        request = client.post("/v1/completions", json=body | {"max_tokens": 400})
        with contextlib.suppress(TimeoutError):
            return (await asyncio.wait_for(request, timeout=0.02)).status_code
        return None
    content = b'{"prompt": "' + b"a" * 70_000 + b'"}' if how == 2 else b'{"prompt": 1.5, '
    headers = {"Content-Type": "application/json"}
    answer = await client.post("/v1/completions", content=content, headers=headers)
    return answer.status_code


async def one_client(
    url: str, seed: int, asked: list[dict[str, Any]], expected: list[str]
) -> list[str]:
    """-> what went wrong."""
    rng, wrong = random.Random(seed), []
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        for _ in range(NUM_REQUESTS):
            number, how = rng.randrange(len(asked)), rng.randrange(8)
            if how < 4:
                status = await misbehave(client, asked[number], how)
                if status not in (None, 200, 400, 413, 429):
                    wrong.append(f"status {status}")
                continue
            got = await read_text(client, asked[number])
            if got not in (expected[number], 429):
                wrong.append(f"{asked[number]}: {got!r} instead of {expected[number]!r}")
    return wrong


@pytest.mark.slow
def test_answers_under_load_are_those_of_the_same_requests_alone(
    model_folder: Path, head_folder: Path, alone: LLM
) -> None:
    asked = bodies(alone)
    expected = [text_alone(alone, body) for body in asked]

    # Blocks for a part of the sixteen: some are preempted.
    def make() -> LLM:
        return make_llm(model_folder, head_folder, max_num_seqs=16, kv_cache_memory_bytes=300_000)

    with running_server(make, max_body_bytes=65_536, max_waiting_requests=4) as server:

        async def all_clients() -> list[list[str]]:
            clients = (one_client(server.url, n, asked, expected) for n in range(NUM_CLIENTS))
            return await asyncio.gather(*clients)

        wrong = [text for texts in asyncio.run(all_clients()) for text in texts]
        assert wrong == []
        server.wait_until_idle()
        wait_for(lambda: num_kept(server) == 0)
        with server.client() as client:
            page = client.get("/metrics").text
    counts = {(f["handler"], f["status"]): n for f, n in samples(page, "http_requests_total")}
    assert counts["none", "413"] > 5
    assert counts["/v1/completions", "400"] > 5
    assert counts["/v1/completions", "200"] > NUM_CLIENTS // 2
    assert not any(status.startswith("5") for _, status in counts)
    assert sum(n for _, n in samples(page, "vllm:num_preemptions_total")) > 0
    ends = {f["finished_reason"] for f, n in samples(page, "vllm:request_success_total") if n}
    assert ends == {"stop", "length"}


def num_kept(server: RunningServer) -> int:
    """Requests that somebody still remembers, on either side."""
    gc.collect()
    llm = server.service.llm
    own = [g for g in gc.get_objects() if type(g) is Generation and g.cancel == llm._cancel]
    return len(own) + len(server.llm._active)


def samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    found = [s for family in text_string_to_metric_families(page) for s in family.samples]
    return [(s.labels, s.value) for s in found if s.name == name]
