"""`peagle bench`: what speculation gains for one's own model, traffic and machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from peagle.cli import bench_table, engines, render
from peagle.cli.bench_flags import BenchFlags
from peagle.cli.flags import Json, expand_flags

RUN = "run"


class _RunByDefault(TyperGroup):
    """`peagle bench MODEL ...` is `peagle bench run MODEL ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault, help="Measure speed, latency, acceptance and losslessness; or compare two."
)


@app.command(RUN)
@expand_flags
def run(
    flags: BenchFlags,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A folder, an id, or smollm2-135m.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder of results; a second run goes on in it.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The same keys as YAML; flags win.", metavar="FILE")
    ] = None,
    overwrite: Annotated[
        bool | None, typer.Option("--overwrite", help="Forget what --out holds.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a grid of method x K x load x workload. `peagle bench compare A B` compares two."""
    from peagle.bench.plan_reading import make_plan, read_yaml

    given = read_yaml(config) if config else {}
    own = {"model": model, "out": out, "overwrite": overwrite}
    given |= flags.given() | {name: value for name, value in own.items() if value is not None}
    plan = make_plan(given, str(config) if config else "the command line")

    from peagle.bench.bench import bench
    from peagle.cli.bench_progress import TerminalProgress

    with TerminalProgress() as progress:
        try:
            results = bench(plan, engines.build_backend, progress, progress.note)
        except KeyboardInterrupt:
            progress.note(
                f"interrupted: {plan.path} keeps what was measured; run it again to go on"
            )
            raise
    file = sys.stderr if as_json else sys.stdout
    bench_table.print_results(results, file=file)
    render.note(f"results: {plan.path}")
    if as_json:
        render.print_json(results.to_json())
    if plan.batch_invariant and results.lossless is not None and results.lossless.different:
        render.note(f"{results.lossless.different} answers differ in spite of --batch-invariant")
        raise typer.Exit(1)


@app.command("compare")
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="An --out of peagle bench: before.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another: after.")],
    tolerance: Annotated[
        float | None, typer.Option(help="A loss below this share is no regression.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare what is not alike too.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two results; exit code 1 on a regression beyond noise."""
    from peagle.cli.bench_compare import run_compare

    raise typer.Exit(run_compare(a, b, tolerance=tolerance, force=force, as_json=as_json))
