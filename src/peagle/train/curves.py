"""curves.png of a run: loss, accuracy by depth, acceptance length by K."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peagle.files import atomic_file

CURVES = "curves.png"


def draw_curves(lines: list[dict[str, Any]], path: Path) -> None:
    """`lines` are those of metrics.jsonl. Needs matplotlib."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    train = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "evaluate"]
    figure = Figure(figsize=(15, 4), layout="constrained")
    loss, accuracy, acceptance = figure.subplots(1, 3)
    steps = [line["step"] for line in train]
    loss.plot(steps, [line["loss"] for line in train])
    for depth in range(len(train[0]["accuracy"]) if train else 0):
        accuracy.plot(steps, [line["accuracy"][depth] for line in train], label=f"depth {depth}")
    evaluated = [line["step"] for line in evaluations]
    lengths = [line["all"]["acceptance_length"] for line in evaluations]
    for k, by_step in enumerate(zip(*lengths, strict=True), start=1):
        acceptance.plot(evaluated, by_step, marker=".", label=f"K = {k}")
    for axes, title in ((loss, "loss"), (accuracy, "accuracy"), (acceptance, "acceptance length")):
        axes.set(title=title, xlabel="step")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
