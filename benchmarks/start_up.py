"""Where the time from the start of a process to its first token goes.

    python benchmarks/start_up.py --out benchmarks/results/start_up_cpu.json

Each run is a process of its own that builds an `LLM` and reads one answer. The first finds empty
caches of compiled kernels, ours (C) and Triton's; the others find what it left. `--evict` also
asks the system to forget the files of Python's packages and of the model before the first run:
a cold disk. Files that another process has mapped stay.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"
PROMPT = "Hi"
NUM_TOKENS = 8
# The steps of LLM's constructor, by the names it calls them, and ours for them.
STEPS = {
    "load_tokenizer": "tokenizer",
    "load_engine_target": "weights",
    "load_speculation": "head",
    "Engine": "engine",
}
STAGES = (
    *("interpreter", "import torch", "import peagle", "device"),
    *STEPS.values(),
    *("rest of LLM()", "first token", "other tokens"),
)


class Clock:
    """Seconds by stage; a stage within another counts once, as itself."""

    def __init__(self, started: float) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._last = started

    def lap(self, stage: str) -> None:
        """What passed since the last lap belongs to this stage."""
        now = time.monotonic()
        self.seconds[stage] += now - self._last
        self._last = now

    def timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            self.lap("rest of LLM()")
            try:
                return function(*args, **options)
            finally:
                self.lap(stage)

        return run


def child(args: argparse.Namespace) -> dict[str, Any]:
    """One process's stages. Imports nothing before the clock runs."""
    clock = Clock(args.started)
    clock.lap("interpreter")
    import torch

    clock.lap("import torch")
    from peagle.engine import llm as module
    from peagle.sampling_params import SamplingParams

    clock.lap("import peagle")
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.zeros(1, device="cuda")  # the driver's context
    clock.lap("device")
    for name, stage in STEPS.items():
        setattr(module, name, clock.timed(getattr(module, name), stage))
    speculative = {"model": args.head} if args.head else None
    llm = module.LLM(args.model, device=args.device, speculative_config=speculative)
    clock.lap("rest of LLM()")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = llm.stream([{"role": "user", "content": PROMPT}], params)
    output = next(answers)
    clock.lap("first token")
    for output in answers:  # noqa: B007 - the last is read
        pass
    clock.lap("other tokens")
    return {
        "seconds": clock.seconds,
        "until_first_token": sum(clock.seconds.values()) - clock.seconds["other tokens"],
        "text": output.outputs[0].text,
        "device": "cuda" if on_gpu else "cpu",
        "imports_transformers": "transformers" in sys.modules,
        "imports_torchs_compiler": "torch._dynamo" in sys.modules,
        "modules": len(sys.modules),
    }


def run_child(folder: Path, caches: Path, args: argparse.Namespace) -> dict[str, Any]:
    """`caches` stands in for the user's own, so that a first run is one."""
    command = [sys.executable, __file__, "--model", str(folder), "--device", args.device]
    command += ["--head", args.head] if args.head else []
    own = {"PEAGLE_CACHE": str(caches / "peagle"), "TRITON_CACHE_DIR": str(caches / "triton")}
    started = time.monotonic()
    done = subprocess.run(
        [*command, "--started", repr(started)],
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def evict(folder: Path) -> int:
    """Asks the system to drop the files of a folder from its cache; -> how many there were."""
    count = 0
    for path in _files(folder):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        count += 1
    return count


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from peagle.checkpoints.references import resolve_model

    folder = resolve_model(args.model)
    with tempfile.TemporaryDirectory() as caches:
        evicted = 0
        if args.evict:
            os.sync()  # pages that are not written yet stay
            evicted = sum(map(evict, (Path(sysconfig.get_path("purelib")), folder)))
        first = run_child(folder, Path(caches), args)
        later = [run_child(folder, Path(caches), args) for _ in range(args.repeats)]
    return {
        "first": first,
        "later": later,
        "median": {
            "until_first_token": statistics.median(r["until_first_token"] for r in later),
            "seconds": {s: statistics.median(r["seconds"][s] for r in later) for s in STAGES},
        },
        "evicted_files": evicted,
    }


def print_table(result: dict[str, Any]) -> None:
    first, median = result["first"], result["median"]
    print(f"{'seconds':<16}{'first':>8}{'later':>8}")
    for stage in STAGES:
        print(f"{stage:<16}{first['seconds'][stage]:>8.2f}{median['seconds'][stage]:>8.2f}")
    total = "until_first_token"
    print(f"{'to first token':<16}{first[total]:>8.2f}{median[total]:>8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--head", help="a head to draft with; plain without")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--evict", action="store_true", help="begin with a cold disk cache")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.started is not None:
        print(json.dumps(child(args)))
        return
    from peagle.files import write_json
    from peagle.provenance import provenance

    measured = measure(args)
    print_table(measured)
    result = measured | {
        "workload": {
            "model": args.model,
            "head": args.head,
            "device": args.device,
            "prompt": PROMPT,
            "num_tokens": NUM_TOKENS,
            "repeats": args.repeats,
        },
        "provenance": provenance(),
    }
    if args.out:
        write_json(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
