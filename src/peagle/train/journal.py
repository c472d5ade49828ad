"""What a run leaves to read: metrics.jsonl always, TensorBoard and curves where installed."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


class Journal:
    def __init__(self, folder: Path, *, silent: bool = False) -> None:
        self.folder, self.silent = folder, silent
        self._board: Any = None
        if not silent and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, kind: str, record: dict[str, Any]) -> None:
        if self.silent:
            return
        line = {"kind": kind, **record}
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        logger.info("%s", describe(line))
        if self._board is not None:
            for name, value in scalars(line).items():
                self._board.add_scalar(name, value, line["step"])

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if not self.silent and importlib.util.find_spec("matplotlib") is not None:
            draw_curves(self.folder)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    text = (folder / METRICS).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of one line under the names that plots show."""
    if line["kind"] == "evaluate":
        lengths = line["all"]["acceptance_length"]
        return {f"acceptance_length/K={k}": x for k, x in enumerate(lengths, start=1)}
    names = ("loss", "gradient_norm", "learning_rate", "tokens_per_second", "waiting_share")
    by_depth = {f"accuracy/depth={d}": x for d, x in enumerate(line["accuracy"])}
    return {f"train/{name}": line[name] for name in names} | by_depth


def describe(line: dict[str, Any]) -> str:
    """One line for the terminal."""
    if line["kind"] == "evaluate":
        lengths = line["all"]["acceptance_length"]
        return f"step {line['step']}: acceptance length by K {lengths}"
    accuracy = " ".join(f"{x:.2f}" for x in line["accuracy"])
    return (
        f"step {line['step']} ({line['minutes']:.1f} min): loss {line['loss']:.4f}, "
        f"by depth {accuracy}, {line['tokens_per_second']} tokens/s, "
        f"waiting {line['waiting_share']:.1%}"
    )


def draw_curves(folder: Path) -> None:
    """RUN/curves.png: loss, accuracy by depth, acceptance length by K."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    lines = read_metrics(folder)
    train = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "evaluate"]
    figure = Figure(figsize=(15, 4), layout="constrained")
    loss, accuracy, acceptance = figure.subplots(1, 3)
    steps = [line["step"] for line in train]
    loss.plot(steps, [line["loss"] for line in train])
    for depth in range(len(train[0]["accuracy"]) if train else 0):
        accuracy.plot(steps, [line["accuracy"][depth] for line in train], label=f"depth {depth}")
    for line in evaluations:
        lengths = line["all"]["acceptance_length"]
        acceptance.plot(range(1, len(lengths) + 1), lengths, label=f"step {line['step']}")
    for axes, title in ((loss, "loss"), (accuracy, "accuracy"), (acceptance, "acceptance length")):
        axes.set(title=title, xlabel="K" if axes is acceptance else "step")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    figure.savefig(folder / "curves.png", dpi=120)
