"""`peagle capture`: the target's hidden states to disk, for training without the target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from peagle.cli import render
from peagle.cli.flags import Json, expand_flags
from peagle.cli.flags.engine import EngineFlags
from peagle.errors import ConfigError
from peagle.progress import track

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
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
        int | None, typer.Option(help="Cut longer rows, as data.tokens_per_row will.")
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
    from peagle.train.features.capture import plan_capture, run_capture
    from peagle.train.recipe import vllm_section

    if vllm and backend != "vllm":
        raise ConfigError("--vllm has no effect on the embedded engine", hint="add --backend vllm")
    if backend == "vllm" and "quantization" in engine.given:
        raise ConfigError(
            "--quantization is the embedded engine's here",
            hint=f"use --vllm 'args=[--quantization={engine.given['quantization']}]'",
        )
    section = vllm_section(vllm or []) if backend == "vllm" else None
    opened = Dataset(dataset, max_length)
    plan = plan_capture(opened, model, engine.config(), _layer_ids(layer_ids), section)
    render.note(f"{plan.num_rows} rows, {plan.num_tokens} tokens: {plan.num_bytes / 2**30:.2f} GiB")
    if not forecast_only:
        passes = run_capture(opened, plan, out, tokens_per_pass=TOKENS_PER_PASS, max_disk=limit)
        with track("capturing", plan.num_rows, "rows") as work:
            for done in passes:
                work.reach(done)
    if as_json:
        document = {"rows": plan.num_rows, "tokens": plan.num_tokens, "bytes": plan.num_bytes}
        render.print_json(
            {
                **document,
                "path": str(out),
                "aux_hidden_state_layers": list(plan.aux_hidden_state_layers),
            }
        )


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"--max-disk {text!r} is not a size", hint="write 200G or 1.5T")
    return int(float(match[1]) * UNITS[match[2].upper()])


def _layer_ids(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--layer-ids {text!r} is not a list", hint="write 2,15,27") from None
