"""`peagle train`: a head for a target, from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peagle.cli import render


def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe; recipes/ holds examples.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes to the recipe."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete recipe and exit.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure a few steps, forecast the run and exit.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest good checkpoint.")
    ] = False,
) -> None:
    """Train a P-EAGLE or EAGLE-3 head."""
    from peagle.train.recipe import load_recipe

    chosen = load_recipe(recipe, overrides or [])
    if print_config:
        render.print_json(chosen.as_dict())
        return

    from peagle.train.forecast import forecast
    from peagle.train.loop import Run, total_steps
    from peagle.train.setup import build

    setup = build(chosen)
    if dry_run:
        render.print_json(forecast(setup, total_steps(setup)))
        return
    progress = Run(setup, resume=resume)()
    render.print_json({"head": str(Path(chosen.run.folder) / "head"), **progress._asdict()})
