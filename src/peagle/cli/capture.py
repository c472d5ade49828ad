"""`peagle capture`: the target's hidden states to disk, for training without the target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peagle.cli import render
from peagle.cli.flags import Json, expand_flags
from peagle.cli.flags.engine import EngineFlags
from peagle.errors import ConfigError
from peagle.files import check_folder, held_folder
from peagle.progress import track

if TYPE_CHECKING:
    from peagle.data.dataset import Dataset
    from peagle.train.features.capture import CapturePlan

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MOST_DIGITS = 20  # of a size: more are a typing error
TOKENS_PER_PASS = 8192


@expand_flags
def capture(
    engine: EngineFlags,
    dataset: Annotated[Path, typer.Argument(help="A dataset of peagle prepare.")],
    model: Annotated[str, typer.Option(help="The target, as the recipe names it.")],
    out: Annotated[Path, typer.Option(help="Folder for the states; a second run continues it.")],
    max_disk: Annotated[
        str | None,
        typer.Option(help="Refuse to write more than this, e.g. 200G or 1.5T.", metavar="SIZE"),
    ] = None,
    layer_ids: Annotated[
        str | None,
        typer.Option(help="Layers of the aux hidden states, e.g. 2,15,27; default: 2, L//2, L-3."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Cut longer rows, as data.tokens_per_row will.", min=1)
    ] = None,
    backend: Annotated[
        Literal["embedded", "vllm"], typer.Option(help="Where the target runs.")
    ] = "embedded",
    vllm: Annotated[
        list[str] | None,
        typer.Option(
            help="With --backend vllm: a key of a recipe's vllm section; repeatable.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    forecast_only: Annotated[
        bool, typer.Option("--forecast", help="Show how much disk it would take, and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the hidden states that a head reads; training then needs no pass of the target."""
    limit = None if max_disk is None else parse_size(max_disk)
    from peagle.data.dataset import Dataset
    from peagle.train.features.capture import plan_capture, size_in_words
    from peagle.train.recipe import vllm_section

    if vllm and backend != "vllm":
        raise ConfigError("--vllm has no effect on the embedded engine", hint="add --backend vllm")
    if backend == "vllm" and "quantization" in engine.given:
        raise ConfigError(
            "--quantization is the embedded engine's here",
            hint=f"use --vllm 'args=[--quantization={engine.given['quantization']}]'",
        )
    if not forecast_only:
        check_folder(out)
    section = vllm_section(vllm or []) if backend == "vllm" else None
    opened = Dataset(dataset, max_length)
    plan = plan_capture(opened, model, engine.config(), _layer_ids(layer_ids), section)
    size = size_in_words(plan.num_bytes)
    forecast = f"{plan.num_rows} rows, {plan.num_tokens} tokens: {size}"
    if forecast_only and not as_json:
        render.write(f"{forecast}\n")  # it is what was asked for
    else:
        render.note(forecast)
    if not forecast_only:
        with held_folder(out):
            _write(opened, plan, out, limit)
    if as_json:
        document = {"rows": plan.num_rows, "tokens": plan.num_tokens, "bytes": plan.num_bytes}
        render.print_json(
            {
                **document,
                "path": str(out),
                "aux_hidden_state_layers": list(plan.aux_hidden_state_layers),
            }
        )


def _write(dataset: Dataset, plan: CapturePlan, out: Path, limit: int | None) -> None:
    from peagle.train.features.capture import run_capture

    done = 0
    try:
        passes = run_capture(dataset, plan, out, tokens_per_pass=TOKENS_PER_PASS, max_disk=limit)
        with track("capturing", plan.num_rows, "rows") as work:
            for done in passes:
                work.reach(done)
    except KeyboardInterrupt:
        kept = f"{out} keeps the states of {done} rows" if done else f"{out} keeps what it had"
        render.note(f"interrupted: {kept}; give the same command again to go on")
        raise


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or len(match[1]) > MOST_DIGITS:
        raise ConfigError(f"--max-disk {text!r} is not a size", hint="write 200G or 1.5T")
    return int(float(match[1]) * UNITS[match[2].upper()])


def _layer_ids(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--layer-ids {text!r} is not a list", hint="write 2,15,27") from None
