"""What a run leaves to read: metrics.jsonl always, TensorBoard and curves where installed."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peagle.files import atomic_file, write_atomic

logger = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
BOARD = "tensorboard"
CURVES = "curves.png"
PLOTS = {"tensorboard": "TensorBoard files", "matplotlib": CURVES}  # by package
INSTALL = "pip install 'peagle[plots]'"
Report = Callable[[str], None]


class Journal:
    """`from_step`: where the run goes on, its newest evaluation being that of `evaluated_step`;
    what an earlier one wrote beyond them is forgotten."""

    def __init__(
        self,
        folder: Path,
        report: Report = logger.info,
        *,
        from_step: int = 0,
        evaluated_step: int = -1,
        silent: bool = False,
    ) -> None:
        self.folder, self.report, self.silent = folder, report, silent
        missing = [name for name in PLOTS if importlib.util.find_spec(name) is None]
        self._draws = not silent and "matplotlib" not in missing
        self._board: Any = None
        if silent:
            return
        forget_after(folder, from_step, evaluated_step)
        if missing:
            files = " and ".join(PLOTS[name] for name in missing)
            report(f"not written: {files}; {' and '.join(missing)} missing: {INSTALL}")
        if "tensorboard" not in missing:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / BOARD), purge_step=from_step + 1)

    def write(self, kind: str, record: dict[str, Any]) -> None:
        if self.silent:
            return
        line = {"kind": kind, **record}
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.report(describe(line))
        if self._board is not None:
            for name, value in scalars(line).items():
                self._board.add_scalar(name, value, line["step"])
        if kind == "evaluate":
            self._draw()

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        self._draw()

    def _draw(self) -> None:
        if self._draws:
            draw_curves(read_metrics(self.folder), self.folder / CURVES)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, less one that a kill cut short."""
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [json.loads(line) for line in lines[:-1]]  # a whole line ends with a newline


def forget_after(folder: Path, step: int, evaluated_step: int) -> None:
    """What will be done again leaves no second line, and half a line is removed."""
    newest = {"train": step, "evaluate": evaluated_step}
    if (folder / METRICS).exists():
        kept = [line for line in read_metrics(folder) if line["step"] <= newest[line["kind"]]]
        write_atomic(folder / METRICS, "".join(json.dumps(line) + "\n" for line in kept))


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of one line under the names that plots show."""
    if line["kind"] == "evaluate":
        lengths = line["all"]["acceptance_length"]
        return {f"acceptance_length/K={k}": x for k, x in enumerate(lengths, start=1)}
    names = (
        "loss",
        "gradient_norm",
        "learning_rate",
        "tokens_per_second",
        "waiting_share",
        "num_cut",
    )
    by_depth = {f"accuracy/depth={d}": x for d, x in enumerate(line["accuracy"])}
    return {f"train/{name}": line[name] for name in names} | by_depth


def describe(line: dict[str, Any]) -> str:
    """One line for the terminal."""
    if line["kind"] == "evaluate":
        lengths = " ".join(f"{x:.2f}" for x in line["all"]["acceptance_length"])
        return f"step {line['step']}: acceptance length by K {lengths}"
    accuracy = " ".join(f"{x:.2f}" for x in line["accuracy"])
    return (
        f"step {line['step']} ({line['done']:.0%}, {line['minutes']:.1f} min): "
        f"loss {line['loss']:.4f}, accuracy by position {accuracy}, "
        f"{line['tokens_per_second']} tokens/s, waiting {line['waiting_share']:.1%}"
    )


def draw_curves(lines: list[dict[str, Any]], path: Path) -> None:
    """Loss, accuracy by draft position and acceptance length by K from the lines of metrics.jsonl;
    a panel for each of them that has values. Needs matplotlib."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    panels = {name: curves for name, curves in curves_of(lines).items() if curves}
    if not panels:
        return
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, (title, curves) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for label, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker=".", label=label)
        axes.set(title=title, xlabel="step")
        if len(curves) > 1:
            axes.legend(fontsize=7)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def curves_of(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Title of a panel -> label of a curve -> step and value. Positions count from 1, as K does."""
    found: dict[str, dict[str, list[tuple[int, float]]]]
    found = {"loss": {}, "accuracy": {}, "acceptance length": {}}
    for line in lines:
        step = line["step"]
        if line["kind"] == "evaluate":
            for k, value in enumerate(line["all"]["acceptance_length"], start=1):
                found["acceptance length"].setdefault(f"K = {k}", []).append((step, value))
            continue
        found["loss"].setdefault("loss", []).append((step, line["loss"]))
        for position, value in enumerate(line["accuracy"], start=1):
            found["accuracy"].setdefault(f"draft {position}", []).append((step, value))
    return found
