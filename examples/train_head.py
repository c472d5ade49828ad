"""Make a head for a model of your own: prepare, train, evaluate, use.

    python examples/train_head.py FOLDER

The four commands that a real run takes, with few prompts and few steps. The head is as bad as four
steps leave it, and the answer is the target's all the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).with_name("head.yaml")
MODEL = "smollm2-135m"
PROMPTS = ("Name a colour.", "Count to ten.", "What is a cat?", "Say hello.", "What is 2 + 2?")


def main(folder: Path) -> None:
    prompts, data, run = folder / "prompts.jsonl", folder / "data", folder / "run"
    prompts.write_text("\n".join(json.dumps({"prompt": p}) for p in PROMPTS), encoding="utf-8")
    peagle("prepare", "--model", MODEL, "--prompts", prompts, "--out", data, "--max-tokens", 16)
    peagle("train", RECIPE, f"target.model={MODEL}", f"data.path={data}", f"run.folder={run}")
    peagle("evaluate", run / "head", "--model", MODEL, "--data", data, "--spec-tokens", 3)
    peagle("generate", MODEL, "Name a colour.", "--spec-model", run / "head", "--max-tokens", 16)


def peagle(*arguments: object) -> None:
    command = [sys.executable, "-m", "peagle", *map(str, arguments)]
    print("$", "peagle", *arguments, flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
