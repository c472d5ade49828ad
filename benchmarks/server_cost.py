"""What HTTP costs: tokens/s and time to first token of `peagle serve` beside the engine alone.

    python benchmarks/server_cost.py --streams 1 --out benchmarks/results/server_cost_cpu.json
    python benchmarks/server_cost.py --streams 1 32 128 --max-num-seqs 128 --out ...

Both run on the same machine, one after the other in turns, so that its noise falls on both. The
clients are processes of their own that read bytes and parse only the last event. Needs the packages
of `peagle[server]`; where no package index is reached, install them from a folder of wheels:

    pip download --dest wheels --no-deps fastapi starlette uvicorn h11 anyio sniffio idna click \\
        annotated-doc typing-inspection prometheus-client
    pip install --no-index --no-deps wheels/*.whl
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from peagle.bench.workloads.offline import PROMPTS
from peagle.files import write_json
from peagle.http import is_healthy
from peagle.provenance import provenance

if TYPE_CHECKING:
    from peagle.engine.llm import LLM

START_SECONDS = 600.0
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
STREAMS_PER_CLIENT = 32  # one process reads so many without being the bottleneck
ANSWERS_PER_STREAM, WARM_UPS = 4, 2


class Record(NamedTuple):
    """One answer; times on the machine's monotonic clock."""

    began: float
    first: float
    ended: float
    num_tokens: int


@dataclass(frozen=True)
class Setting:
    model: str
    head: str | None
    max_tokens: int
    options: tuple[str, ...]  # of the engine, for both

    def body(self, number: int) -> dict[str, Any]:
        texts = [text for group in PROMPTS.values() for text in group]
        return {
            "messages": [{"role": "user", "content": texts[number % len(texts)]}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@contextlib.contextmanager
def running_server(setting: Setting, *more: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """`peagle serve` on a free port; -> the port."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = int(trial.getsockname()[1])
    words = [sys.executable, "-m", "peagle", "serve", setting.model, "--port", str(port)]
    words += ["--spec-model", setting.head] if setting.head else []
    words += [*setting.options, "--no-log-requests", *more]
    process = subprocess.Popen(words)
    try:
        until = time.monotonic() + START_SECONDS
        while not is_healthy(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > until:
                sys.exit("the server did not start")
            time.sleep(0.2)
        yield port, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def ask(port: int, body: dict[str, Any]) -> Record:
    """One streamed answer, read as bytes: a client must cost less than what it measures."""
    content = json.dumps(body).encode()
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    first, tail = 0.0, b""
    while piece := await reader.read(1 << 16):
        if not first and b'"content":"' in piece.replace(b'"content":""', b""):
            first = time.monotonic()
        tail = (tail + piece)[-4096:]
    ended = time.monotonic()
    writer.close()
    if b"[DONE]" not in tail:
        raise RuntimeError(f"the answer broke off: {tail[:300]!r}")
    num_tokens = int(COMPLETION_TOKENS.findall(tail)[-1])
    return Record(began, first or ended, ended, num_tokens)


def client_process(connection: Connection) -> None:
    """Answers orders (port, bodies, concurrency) with records, until the connection closes."""

    async def run(port: int, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Record]:
        left = list(bodies)[::-1]
        records: list[Record] = []

        async def stream() -> None:
            while left:
                records.append(await ask(port, left.pop()))

        await asyncio.gather(*(stream() for _ in range(concurrency)))
        return records

    with contextlib.suppress(EOFError):
        while True:
            connection.send(asyncio.run(run(*connection.recv())))


class Clients:
    def __init__(self, streams: int) -> None:
        context = multiprocessing.get_context("spawn")
        count = -(-streams // STREAMS_PER_CLIENT)
        self._shares = [streams // count + (n < streams % count) for n in range(count)]
        self._pipes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            context.Process(target=client_process, args=(theirs,), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)

    def run(self, port: int, bodies: Sequence[dict[str, Any]]) -> list[Record]:
        at = 0
        total = sum(self._shares)
        for pipe, share in zip(self._pipes, self._shares, strict=True):
            size = len(bodies) * share // total
            pipe.send((port, bodies[at : at + size], share))
            at += size
        return [record for pipe in self._pipes for record in pipe.recv()]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()


def run_alone(llm: LLM, bodies: Sequence[dict[str, Any]], streams: int) -> list[Record]:
    """The same requests in the same closed loop, without HTTP."""
    from peagle.engine.prompts import TokenizedPrompt
    from peagle.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=bodies[0]["max_tokens"], ignore_eos=True)
    left = [llm.render_chat(body["messages"]) for body in bodies][::-1]
    began: dict[Any, float] = {}
    records: list[Record] = []

    def add() -> None:
        prompt = left.pop()
        opened = llm.add_request(TokenizedPrompt(None, prompt["prompt_token_ids"]), params)
        began[opened] = time.monotonic()

    for _ in range(min(streams, len(left))):
        add()
    while began:
        for opened in llm.step():
            if opened.finished:
                first = opened.metrics.first_token_time or 0.0
                start = began.pop(opened)
                records.append(Record(start, first, time.monotonic(), opened.num_output_tokens))
                if left:
                    add()
    return records


def figures(records: Sequence[Record]) -> dict[str, float]:
    seconds = max(r.ended for r in records) - min(r.began for r in records)
    waits = sorted(r.first - r.began for r in records)
    return {
        "tokens_per_second": sum(r.num_tokens for r in records) / seconds,
        "ttft_p50": statistics.median(waits),
        "ttft_p99": waits[min(len(waits) - 1, int(0.99 * len(waits)))],
    }


class ServerPids(NamedTuple):
    engine: int
    api_servers: list[int]


def server_pids(pid: int) -> ServerPids:
    """A server's processes: the first API server is the one that was started. It starts the engine
    before the other API servers; one more child only watches over shared things."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    engine, *others = (int(c) for c in children if "resource_tracker" not in _command(c))
    return ServerPids(engine, [pid, *others])


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")


def cpu_seconds(*pids: int) -> float:
    """Of all threads, so far: unlike wall time it hardly depends on who else uses the machine."""
    stats = [Path(f"/proc/{pid}/stat").read_text(encoding="utf-8") for pid in pids]
    fields = [stat.rpartition(")")[2].split() for stat in stats]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def measure(
    llm: LLM, port: int, pid: int, setting: Setting, streams: int, repeats: int
) -> dict[str, Any]:
    pids = server_pids(pid)
    bodies = [setting.body(n) for n in range(max(ANSWERS_PER_STREAM * streams, 8))]
    clients = Clients(streams)
    rounds: dict[str, list[dict[str, float]]] = {"alone": [], "http": []}
    for repeat in range(-WARM_UPS, repeats):  # graphs are captured, and their costs measured
        alone = figures(run_alone(llm, bodies, streams))
        before = cpu_seconds(*pids.api_servers), cpu_seconds(pids.engine)
        records = clients.run(port, bodies)
        after = cpu_seconds(*pids.api_servers), cpu_seconds(pids.engine)
        http, num_tokens = figures(records), sum(r.num_tokens for r in records)
        http["http_cpu_us_per_token"] = (after[0] - before[0]) / num_tokens * 1e6
        http["engine_cpu_us_per_token"] = (after[1] - before[1]) / num_tokens * 1e6
        if repeat >= 0:
            rounds["alone"].append(alone)
            rounds["http"].append(http)
    clients.close()
    shares = [
        h["tokens_per_second"] / a["tokens_per_second"]
        for h, a in zip(rounds["http"], rounds["alone"], strict=True)
    ]
    cell: dict[str, Any] = {"streams": streams, "share_of_engine": statistics.median(shares)}
    cell["shares"] = shares
    cell["api_server_count"] = len(pids.api_servers)
    for side, measured in rounds.items():
        names = measured[0].keys()
        cell[side] = {name: statistics.median(m[name] for m in measured) for name in names}
    return cell


def make_llm(setting: Setting, args: argparse.Namespace) -> LLM:
    from peagle.engine.llm import LLM

    head = {"model": setting.head} if setting.head else None
    options: dict[str, Any] = {"max_num_seqs": args.max_num_seqs, "dtype": args.dtype}
    options |= {"device": args.device, "max_model_len": args.max_model_len}
    options["kv_cache_memory_bytes"] = args.kv_cache_memory_bytes
    return LLM(setting.model, speculative_config=head, **options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", default="smollm2-135m-p-eagle", help="empty: no drafter")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 30)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--api-server-count", type=int)
    parser.add_argument("--out", type=Path)


def setting_of(args: argparse.Namespace) -> Setting:
    names = ("max_num_seqs", "max_model_len", "kv_cache_memory_bytes", "dtype", "device")
    options = [w for n in names for w in (f"--{n.replace('_', '-')}", str(getattr(args, n)))]
    if args.api_server_count is not None:
        options += ["--api-server-count", str(args.api_server_count)]
    return Setting(args.model, args.head or None, args.max_tokens, tuple(options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    setting = setting_of(args)
    with running_server(setting, "--max-waiting-requests", "1024") as (port, process):
        llm = make_llm(setting, args)
        cells = [measure(llm, port, process.pid, setting, n, args.repeats) for n in args.streams]
    document = {"provenance": provenance(probe_torch=True), "cells": cells}
    if args.out:
        write_json(args.out, document)
    print(json.dumps({"cells": cells}))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
