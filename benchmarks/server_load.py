"""`peagle serve` under load: streams with cancels, disconnects, oversized and malformed requests.

    python benchmarks/server_load.py --streams 64 --minutes 10 --out ...

Each distinct request is asked alone first. Under load every whole answer has to be the same text,
every refusal a 4xx, and at the end no block of the KV cache may be in use. Memory of the engine and
of the API servers is read from /proc once a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from server_cost import Setting, add_arguments, running_server, server_pids, setting_of

from peagle.files import write_json
from peagle.provenance import provenance

KINDS = ("whole", "streamed", "cancelled", "disconnected", "oversized", "malformed")
WEIGHTS = (6, 8, 3, 3, 1, 1)
NUM_REQUESTS = 24  # distinct ones
MAX_BODY = 200_000
STOPS: tuple[list[str], ...] = ([], ["\n\n"], [".", "\n"])


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0
    waits: list[float] = field(default_factory=list)  # seconds to the first token
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)  # MiB


def request_body(setting: Setting, number: int) -> dict[str, Any]:
    """Greedy and sampled, with and without stop strings, of different lengths."""
    body = setting.body(number) | {"ignore_eos": False, "seed": number}
    body["temperature"] = (0.0, 0.8)[number % 2]
    body["max_tokens"] = setting.max_tokens // (1 + number % 4)
    body["stop"] = STOPS[number % 3]
    del body["stream_options"], body["stream"]
    return body


async def whole(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, str]:
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return answer.status_code, ""
    return 200, answer.json()["choices"][0]["message"]["content"]


async def streamed(
    client: httpx.AsyncClient, body: dict[str, Any], tally: Tally, *, stop_after: int | None = None
) -> tuple[int, str]:
    """`stop_after`: goes away after so many events."""
    began, text, count = time.monotonic(), "", 0
    async with client.stream(
        "POST", "/v1/chat/completions", json=body | {"stream": True}
    ) as answer:
        if answer.status_code != 200:
            return answer.status_code, ""
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                document = json.loads(line[6:])
                if "error" in document:
                    return 500, ""
                text += document["choices"][0]["delta"].get("content") or ""
                count += 1
                if count == 2:
                    tally.waits.append(time.monotonic() - began)
                if count == stop_after:
                    break
    return 200, text


async def one_request(
    client: httpx.AsyncClient,
    rng: random.Random,
    bodies: list[dict[str, Any]],
    expected: list[str],
    tally: Tally,
) -> None:
    kind, number = rng.choices(KINDS, WEIGHTS)[0], rng.randrange(len(bodies))
    body, status, text = bodies[number], 0, ""
    if kind == "whole":
        status, text = await whole(client, body)
    elif kind == "streamed":
        status, text = await streamed(client, body, tally)
    elif kind == "disconnected":
        status, _ = await streamed(client, body, tally, stop_after=rng.randint(1, 12))
    elif kind == "cancelled":
        with contextlib.suppress(TimeoutError):
            status, _ = await asyncio.wait_for(whole(client, body), rng.uniform(0.0, 3.0))
    else:
        long = b'{"messages": "' + b"a" * (MAX_BODY + 1) + b'"}'
        content = long if kind == "oversized" else b'{"messages": [{"role": "user"'
        headers = {"Content-Type": "application/json"}
        answer = await client.post("/v1/chat/completions", content=content, headers=headers)
        status = answer.status_code
    tally.counts[f"{kind} {status or 'gone'}"] += 1
    if status >= 500:
        tally.wrong.append(f"{kind}: status {status}")
    if kind in ("whole", "streamed") and status == 200 and text != expected[number]:
        tally.wrong.append(f"request {number}: {text!r} instead of {expected[number]!r}")
    if status == 429:
        await asyncio.sleep(rng.uniform(0.1, 1.0))


def resident(pid: int) -> float:
    """MiB in memory that the process shares with nobody else."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    kinds = ("Private_Clean", "Private_Dirty")
    found = [re.search(rf"^{kind}:\s+(\d+) kB", text, re.MULTILINE) for kind in kinds]
    return sum(int(match[1]) for match in found if match) / 1024


async def watch(pid: int, tally: Tally) -> None:
    pids = server_pids(pid)
    while True:
        sizes = {"http": sum(map(resident, pids.api_servers)), "engine": resident(pids.engine)}
        tally.memory.append((time.monotonic(), sizes))
        await asyncio.sleep(1.0)


async def load(
    port: int, pid: int, setting: Setting, args: argparse.Namespace
) -> tuple[Tally, dict[str, float]]:
    tally = Tally()
    bodies = [request_body(setting, n) for n in range(NUM_REQUESTS)]
    limits = httpx.Limits(max_connections=None)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        expected = [(await whole(client, body))[1] for body in bodies]
        until = time.monotonic() + 60 * args.minutes

        async def stream(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < until:
                await one_request(client, rng, bodies, expected, tally)

        watching = asyncio.create_task(watch(pid, tally))
        await asyncio.gather(*(stream(n) for n in range(args.streams)))
        await asyncio.sleep(2.0)
        watching.cancel()
        return tally, await idle_figures(client)


async def idle_figures(client: httpx.AsyncClient) -> dict[str, float]:
    """What the server says of its engine."""
    page = (await client.get("/metrics")).text
    names = (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("generation_tokens_total", "num_preemptions_total"),
    )
    figures = {}
    for name in names:
        match = re.search(rf"^vllm:{name}{{.*}} (\S+)$", page, re.MULTILINE)
        figures[name] = float(match[1]) if match else float("nan")
    return figures


def growth(tally: Tally, name: str) -> dict[str, float]:
    """MiB after a quarter of the time, when all is warm, and at the end; each a median."""
    sizes = [sizes[name] for _, sizes in tally.memory]
    quarter = max(len(sizes) // 4, 1)
    middle = sorted(sizes[quarter : 2 * quarter] or sizes)
    end = sorted(sizes[-quarter:])
    return {"warm": middle[len(middle) // 2], "end": end[len(end) // 2], "most": max(sizes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    setting = setting_of(args)
    more = ("--max-body-bytes", str(MAX_BODY))
    with running_server(setting, *more) as (port, process):
        tally, idle = asyncio.run(load(port, process.pid, setting, args))
    waits = sorted(tally.waits)
    result = {
        "streams": args.streams,
        "minutes": args.minutes,
        "api_server_count": args.api_server_count,
        "requests": dict(sorted(tally.counts.items())),
        "wrong": tally.wrong[:20],
        "num_wrong": len(tally.wrong),
        "idle": idle,
        "memory_mib": {name: growth(tally, name) for name in ("http", "engine")},
        "ttft_p50": waits[len(waits) // 2] if waits else None,
        "ttft_p99": waits[int(0.99 * len(waits))] if waits else None,
    }
    if args.out:
        write_json(args.out, {"provenance": provenance(probe_torch=True), **result})
    print(json.dumps(result))
    leaked = idle["kv_cache_usage_perc"] != 0 or idle["num_requests_running"] != 0
    sys.exit(1 if tally.wrong or leaked else 0)


if __name__ == "__main__":
    main()
