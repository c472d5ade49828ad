"""`peagle train`: a head for a target, from a recipe."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli import render
from peagle.cli.flags import Json
from peagle.files import held_folder

if TYPE_CHECKING:
    from peagle.train.memory import Footprint
    from peagle.train.recipe import Recipe

GIB = 2**30


def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe; recipes/ holds examples.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes to the recipe."),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config", help="Print every key with its value and meaning, as YAML, and exit."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Compute the memory, measure a few steps, forecast the run and exit.",
        ),
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(help="With --dry-run: compute for so many GPUs; default: torchrun's.", min=1),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest good checkpoint.")
    ] = False,
    vllm_command: Annotated[
        bool,
        typer.Option("--vllm-command", help="Print the server for data.features=vllm and exit."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a P-EAGLE or EAGLE-3 head."""
    from peagle.train.recipe import load_recipe

    chosen = load_recipe(recipe, overrides or [])
    if print_config:
        from peagle.train.recipe_yaml import commented_yaml

        _show(chosen.as_dict(), commented_yaml(chosen), as_json)
    elif vllm_command:
        from peagle.train.features.vllm_server import shell_command

        command = shell_command(chosen)
        _show({"command": command}, f"{command}\n", as_json)
    elif dry_run:
        num_gpus = gpus or int(os.environ.get("WORLD_SIZE", "1"))
        document = _dry_run(chosen, num_gpus, sys.stderr if as_json else sys.stdout)
        _show(document, "", as_json)
    else:
        document = _train(chosen, resume=resume)
        _show(document, _outcome(document), as_json)


def _show(document: dict[str, Any], text: str, as_json: bool) -> None:
    if not _is_first_process():
        return
    if as_json:
        render.print_json(document)
    else:
        render.write(text)


def _train(recipe: Recipe, *, resume: bool) -> dict[str, Any]:
    from peagle.train.loop import TrainingRun
    from peagle.train.run_folder import check_start
    from peagle.train.setup import build

    folder = Path(recipe.run.folder)
    check_start(recipe, resume=resume)  # before seconds are spent on loading
    with held_folder(folder) if _is_first_process() else nullcontext():
        run = TrainingRun(build(recipe), resume=resume, report=render.note)
        try:
            progress = run()
        except KeyboardInterrupt:
            if _is_first_process():
                render.note(f"interrupted: {_how_to_go_on(folder, run.saved_step)}")
            raise
    evaluated = progress.best_step >= 0
    return {
        "head": str(folder / "head"),
        **progress._asdict(),
        "best": progress.best if evaluated else None,
        "best_step": progress.best_step if evaluated else None,
    }


def _outcome(document: dict[str, Any]) -> str:
    """`runs/m/head: best at step 900 of 1000, acceptance length 2.31`."""
    head, last = document["head"], document["step"]
    if document["best"] is None:
        return f"{head}: from step {last}; no rows were held out to evaluate it\n"
    best = f"acceptance length {document['best']:.2f}"
    return f"{head}: best at step {document['best_step']} of {last}, {best}\n"


def _how_to_go_on(folder: Path, step: int) -> str:
    if not step:
        return f"no step is saved in {folder}; give the same command to start again"
    return f"{folder} keeps step {step}; give the same command with --resume to go on"


def _dry_run(recipe: Recipe, num_gpus: int, file: IO[str]) -> dict[str, Any]:
    """First what is computed, for a GPU even where there is none; then what is measured here."""
    from peagle.train.forecast import forecast
    from peagle.train.inputs import read_inputs
    from peagle.train.loop import total_steps
    from peagle.train.memory import footprint
    from peagle.train.setup import build, pick_device

    inputs = read_inputs(recipe)
    here = pick_device(recipe.run.device).type
    computed = {}
    if recipe.run.device != "cpu":
        computed["cuda"] = footprint(inputs, num_gpus, "cuda")
    if here == "cpu":
        computed["cpu"] = footprint(inputs, 1, "cpu")
    for device, one in computed.items():
        _print_memory(device, one, file)
    setup = build(recipe)
    measured = forecast(setup, total_steps(setup))
    _print_forecast(measured, computed[here].total / GIB, here, file)
    return {"memory": {d: _document(one) for d, one in computed.items()}, **measured}


def _print_memory(device: str, computed: Footprint, file: IO[str]) -> None:
    if not _is_first_process():
        return
    where = "on a CPU" if device == "cpu" else f"on each of {computed.num_gpus} GPUs"
    title = f"Memory {where.replace('each of 1 GPUs', 'one GPU')}, computed"
    parts = {name: size for name, size in computed.parts.items() if size}
    rows = [(name, f"{size / GIB:.3f}") for name, size in parts.items()]
    rows.append(("all", f"{computed.total / GIB:.3f}"))
    render.print_table(title, ("", "GiB"), rows, file=file)


def _print_forecast(
    measured: dict[str, Any], computed_gib: float, device: str, file: IO[str]
) -> None:
    if not _is_first_process():
        return
    peak = "peak of the GPU's tensors" if device == "cuda" else "peak, libraries included"
    render.print_table(
        "The run, from a few steps",
        ("", "computed", "measured"),
        [
            (f"{peak}, GiB", f"{computed_gib:.2f}", f"{measured['peak_memory_gib']:.2f}"),
            ("tokens/s", "", f"{measured['tokens_per_second']:.0f}"),
            ("waiting for rows", "", f"{measured['waiting_share']:.1%}"),
            ("seconds per step", "", f"{measured['seconds_per_step']:.3f}"),
            ("steps", f"{measured['forecast_steps']}", ""),
            ("minutes in steps", f"{measured['forecast_minutes']:.1f}", ""),
            ("disk at most, GiB", f"{measured['disk_gib']:.2f}", ""),
            ("disk free, GiB", "", f"{measured['disk_free_gib']:.1f}"),
        ],
        file=file,
    )


def _document(computed: Footprint) -> dict[str, Any]:
    return {
        "parts_bytes": computed.parts,
        "total_gib": computed.total / GIB,
        "rows_per_pass": computed.rows_per_pass,
        "passes_per_step": computed.passes_per_step,
        "num_gpus": computed.num_gpus,
    }


def _is_first_process() -> bool:
    """Whether this is the first of the processes that torchrun starts."""
    return os.environ.get("RANK", "0") == "0"
