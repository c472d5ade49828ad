"""Measure what a drafter gains, and read the result file.

    python examples/bench.py FOLDER

A grid this small says nothing about your machine; docs/benchmarking.md has the real one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

GRID = {
    "--spec-model": "smollm2-135m-p-eagle",
    "--spec-tokens": "3,5",
    "--concurrency": "1",
    "--workload": "offline",
    "--num-prompts": "1",
    "--answers-per-stream": "1",
    "--max-tokens": "16",
    "--repeats": "1",
}


def main(folder: Path) -> None:
    flags = [word for flag in GRID.items() for word in flag]
    command = [
        sys.executable,
        "-m",
        "peagle",
        "bench",
        "smollm2-135m",
        *flags,
        "--out",
        str(folder),
    ]
    subprocess.run(command, check=True)
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for cell in results["cells"]:
        summary = cell["summary"]
        name = f"{cell['method']} K = {cell['num_speculative_tokens']}"
        speed = summary["otps"]["value"]
        print(f"{name:12} {speed:6.1f} tokens/s", summary["acceptance_length"] or "")
    print("answers that differ from plain decoding's:", results["lossless"]["different"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
