"""Speed of the embedded engine and of vLLM on the same CPU, same head, one request at a time.

    python benchmarks/engine_vs_vllm_cpu.py --out benchmarks/results/engine_vs_vllm_cpu.json

Four engines, each in a process of its own: both backends plain and with the P-EAGLE head. They
answer in turn, round after round, so that drift of the machine hits all alike; the one that waits
sleeps. vLLM runs as its CPU guide asks: its own processes, Intel's OpenMP preloaded, compiled
(--enforce-eager turns that off).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.backends.vllm.options import VllmOptions
from peagle.cli.demo import PROMPTS
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.files import write_atomic
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams

MODEL, HEAD = "smollm2-135m", "smollm2-135m-p-eagle"
ENGINE = EngineConfig(dtype="float32", max_model_len=1024, max_num_seqs=1)
KV_CACHE_BYTES = 1 << 30
VLLM_PYTHON = Path(__file__).parent.parent / ".venv-vllm" / "bin" / "python"
PAUSE = 0.5  # seconds between two jobs: OpenMP threads of the last one spin for a while
READY = "ready"


@dataclass
class Worker:
    """One engine in a process of its own, which answers all prompts when told to."""

    name: str
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.last = self.read()
        self.seconds.append(self.last["seconds"])

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"error: the process of {self.name} ended; see above")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def start(args: argparse.Namespace, backend: str, k: int) -> Worker:
    python = args.vllm_python if backend == "vllm" else sys.executable
    command = [str(python), __file__, "--worker", backend, "--spec-tokens", str(k)]
    command += ["--num-tokens", str(args.num_tokens), "--num-prompts", str(args.num_prompts)]
    command += ["--enforce-eager"] if args.enforce_eager else []
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(backend, args.threads, Path(python)),
    )
    worker = Worker(f"{backend} {'p-eagle' if k else 'plain'}", process)
    assert worker.read()["state"] == READY
    return worker


def environment(backend: str, threads: int, python: Path) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if backend == "vllm":
        # In its own processes, where vLLM binds threads to cores; it warns against one process.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        env["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        openmp = next(python.parent.parent.glob("lib/**/libiomp5.so"), None)
        env |= {"LD_PRELOAD": str(openmp)} if openmp else {}
    return env


def work(args: argparse.Namespace) -> None:
    """The worker's side: one line of JSON per line of input."""
    llm = build(args)
    prompts = [
        llm.render_chat([{"role": "user", "content": text}]) for text in PROMPTS[: args.num_prompts]
    ]
    params = SamplingParams(temperature=0.0, max_tokens=args.num_tokens, ignore_eos=True)
    llm.generate(prompts[0], params)  # warm-up
    say({"state": READY})
    for _ in sys.stdin:
        before = time.perf_counter()
        outputs = [llm.generate(prompt, params)[0] for prompt in prompts]
        seconds = time.perf_counter() - before
        drafts = sum(output.stats.num_drafts for output in outputs)
        accepted = sum(output.stats.num_accepted_tokens for output in outputs)
        say(
            {
                "seconds": seconds,
                "tokens": [output.outputs[0].token_ids for output in outputs],
                "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
            }
        )
    llm.close()


def build(args: argparse.Namespace) -> Any:
    drafter = None
    if args.spec_tokens:
        drafter = SpeculativeConfig(model=HEAD, num_speculative_tokens=args.spec_tokens)
    if args.worker == "vllm":
        from peagle.backends.vllm.backend import VllmBackend

        options = VllmOptions(
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            enable_prefix_caching=False,  # the same prompts come round again
            enforce_eager=args.enforce_eager or None,
        )
        return VllmBackend(MODEL, ENGINE, drafter, options)
    from peagle import LLM

    return LLM(MODEL, speculative_config=drafter, dtype="float32", max_model_len=1024)


def say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    ways = [(backend, k) for k in (0, args.spec_tokens) for backend in ("embedded", "vllm")]
    workers = [start(args, backend, k) for backend, k in ways]
    try:
        for round_number in range(args.repeats):
            for worker in workers[round_number % 2 :] + workers[: round_number % 2]:
                time.sleep(PAUSE)
                worker.run()
    finally:
        for worker in workers:
            worker.close()
    return summary(workers, args.num_tokens * args.num_prompts)


def summary(workers: list[Worker], num_tokens: int) -> dict[str, Any]:
    speeds = {w.name: num_tokens / statistics.median(w.seconds) for w in workers}
    return {
        "tokens_per_second": speeds,
        "seconds": {w.name: w.seconds for w in workers},
        "mean_acceptance_length": {w.name: w.last["mean_acceptance_length"] for w in workers},
        "same_tokens": {w.name: w.last["tokens"] == workers[0].last["tokens"] for w in workers},
        "ratios": {
            "embedded_over_vllm_p_eagle": speeds["embedded p-eagle"] / speeds["vllm p-eagle"],
            "embedded_over_vllm_plain": speeds["embedded plain"] / speeds["vllm plain"],
            "p_eagle_over_plain_embedded": speeds["embedded p-eagle"] / speeds["embedded plain"],
            "p_eagle_over_plain_vllm": speeds["vllm p-eagle"] / speeds["vllm plain"],
        },
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--spec-tokens", type=int, default=5, metavar="K")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--enforce-eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON, metavar="PYTHON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=["embedded", "vllm"], help=argparse.SUPPRESS)
    return parser.parse_args()


def vllm_versions(python: Path) -> dict[str, str]:
    code = (
        "import json; from importlib.metadata import version; "
        "print(json.dumps({n: version(n) for n in ('vllm-cpu', 'torch', 'transformers')}))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def main() -> None:
    args = parse()
    if args.worker:
        return work(args)
    result = measure(args) | {
        "workload": {
            "model": MODEL,
            "head": HEAD,
            "dtype": "float32",
            "num_speculative_tokens": args.spec_tokens,
            "num_prompts": args.num_prompts,
            "num_tokens": args.num_tokens,
            "requests_at_once": 1,
            "threads": args.threads,
            "vllm_compiled": not args.enforce_eager,
        },
        "vllm_environment": vllm_versions(args.vllm_python),
        "provenance": provenance(),
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(args.out, json.dumps(result, indent=2) + "\n")
    say(result)


if __name__ == "__main__":
    main()
