"""`peagle bench`: what speculation gains for one's own model, traffic and machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from peagle.bench.analysis.gains import gains_at
from peagle.bench.analysis.series import cell_quantiles
from peagle.bench.report.verdict import busy_sentence, lossless_details, lossless_verdict
from peagle.bench.results.figures import (
    NOTHING,
    count,
    counted,
    factor_with_bounds,
    length,
    quantity,
    with_spread,
)
from peagle.bench.results.settings import (
    NONE,
    Setting,
    by_place,
    full_name,
    series_names,
    trees_in_words,
)
from peagle.cli import engines, render
from peagle.cli.flags import Json, expand_flags
from peagle.cli.flags.bench import BenchFlags
from peagle.cli.help import Group

if TYPE_CHECKING:
    from peagle.bench.analysis.compare import CellComparison, Comparison
    from peagle.bench.results.document import Cell, Lossless, Quantiles, Results
    from peagle.bench.results.intervals import Interval

RUN = "run"
RESULT_COLUMNS = (
    *("method", "K", "load", "tokens/s", "speed-up", "acceptance", "no loops"),
    *("TTFT p50", "TPOT p50", "E2EL p95"),
)
MOST_SHOWN = 5
MOST_NAMED = 3  # cells that only one of two results has
COMPARISON_COLUMNS = (
    *("method", "K", "workload", "load"),
    *("A tokens/s", "B tokens/s", "speed of B", "acceptance, A to B"),
)


class _RunByDefault(Group):
    """`peagle bench MODEL ...` is `peagle bench run MODEL ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first_word_is_completed = ctx.resilient_parsing and not args
        if not first_word_is_completed and (not args or args[0] not in self.commands):
            args = [RUN, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The group's commands and the options of the default one."""
        run = self.commands[RUN]
        inside = run.make_context(RUN, [], parent=ctx, resilient_parsing=True)
        found = [*super().shell_complete(ctx, incomplete), *run.shell_complete(inside, incomplete)]
        return list({item.value: item for item in found}.values())


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
    from peagle.bench.run.plan import make_plan, read_yaml

    given = read_yaml(config) if config else {}
    own = {"model": model, "out": out, "overwrite": overwrite}
    given |= flags.given() | {name: value for name, value in own.items() if value is not None}
    plan = make_plan(given, str(config) if config else "the command line")

    from peagle.bench.run.bench import bench
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
    print_results(results, file=file)
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
        float | None, typer.Option(help="A loss below this share does not count.", min=0, max=1)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare what is not alike too.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two results; exit code 1 on a regression beyond noise."""
    from peagle.bench.analysis.compare import TOLERANCE
    from peagle.bench.analysis.compare import compare as compare_results
    from peagle.bench.results.document import load_results

    allowed = TOLERANCE if tolerance is None else tolerance
    found = compare_results(load_results(a), load_results(b), tolerance=allowed, force=force)
    print_comparison(found, sys.stderr if as_json else sys.stdout)
    if as_json:
        render.print_json(found.to_json())
    raise typer.Exit(found.exit_code)


def print_results(results: Results, *, file: IO[str]) -> None:
    """One table per workload, times in milliseconds, then what the check of losslessness found."""
    names, rows = series_names(results.cells), dict[str, list[list[str]]]()
    for place, cells in by_place(results.cells).items():
        gained = gains_at(place, cells)
        rows.setdefault(place.workload, []).extend(
            _result_row(names[setting.series], cell, gained.get(setting))
            for setting, cell in cells.items()
        )
    for workload, own in rows.items():
        title = f"{workload} (latencies in ms)"
        render.print_table(title, RESULT_COLUMNS, own, names=3, file=file)
    for line in lossless_lines(results.lossless, results.manifest.dtype):
        file.write(line + "\n")
    for line in _failures(results):
        file.write(line + "\n")
    if trees := trees_in_words(results.cells):
        file.write(f"{trees}\n")
    if busy := busy_sentence(results):
        file.write(f"{busy}\n")
    if results.partial:
        file.write("partial: not every run of the grid is there\n")


def _failures(results: Results) -> list[str]:
    found = dict.fromkeys(e for c in results.cells for run in c.repeats for e in run.errors)
    lines = [f"failed: {error}" for error in list(found)[:MOST_SHOWN]]
    more = len(found) - len(lines)
    return [*lines, f"  and {more} more: results.json has them"] if more else lines


def lossless_lines(lossless: Lossless | None, dtype: str) -> list[str]:
    if lossless is None:
        return []
    lines = [lossless_verdict(lossless, dtype), *lossless_details(lossless, dtype)]
    for d in lossless.differences[:MOST_SHOWN]:
        gap = "" if d.gap is None else f", log-probabilities {d.gap:.2g} apart"
        name = full_name(Setting(d.method, d.num_speculative_tokens))
        lines.append(
            f"  {name} at {d.load}, {d.prompt}, turn {d.turn + 1}, token {d.position + 1}: "
            f"{d.got_text!r} for {d.expected_text!r}{gap}"
        )
    if lossless.different > MOST_SHOWN:
        more = count(lossless.different - MOST_SHOWN)
        lines.append(f"  and {more} more: peagle report shows them")
    return lines


def _result_row(name: str, cell: Cell, gain: Interval | None) -> list[str]:
    summary = cell.summary()
    assert summary is not None, "a cell without repeats is left out"
    marks = [" (partial)"] * summary.partial + [" (busy)"] * summary.busy
    return [
        name + "".join(marks),
        str(cell.num_speculative_tokens or NOTHING),
        cell.load,
        with_spread(summary.otps),
        NOTHING if gain is None or cell.method == NONE else factor_with_bounds(gain),
        length(summary.acceptance_length),
        length(summary.acceptance_without_looping),
        _milliseconds(cell_quantiles(cell, "ttft"), "p50"),
        _milliseconds(cell_quantiles(cell, "tpot"), "p50"),
        _milliseconds(cell_quantiles(cell, "e2el"), "p95"),
    ]


def _milliseconds(quantiles: Quantiles | None, name: str) -> str:
    return NOTHING if quantiles is None else quantity(1000 * getattr(quantiles, name))


def print_comparison(found: Comparison, file: IO[str]) -> None:
    render.print_table(
        "B against A",
        COMPARISON_COLUMNS,
        [_comparison_row(cell) for cell in found.cells],
        names=4,
        file=file,
    )
    for warning in found.warnings:
        file.write(f"note: {warning}\n")
    for name, cells in (("A", found.only_a), ("B", found.only_b)):
        if cells:
            more = f" and {count(len(cells) - MOST_NAMED)} more" if len(cells) > MOST_NAMED else ""
            named = "; ".join(cells[:MOST_NAMED])
            file.write(f"only in {name}: {counted(len(cells), 'cell')}: {named}{more}\n")
    slower = sum(cell.slower for cell in found.cells)
    fewer = sum(cell.fewer_accepted for cell in found.cells)
    file.write(
        f"{count(len(found.regressions))} of {counted(len(found.cells), 'cell')} worse beyond "
        f"noise: {count(slower)} in speed, {count(fewer)} in acceptance\n"
    )


def _comparison_row(cell: CellComparison) -> list[str]:
    lengths = f"{length(cell.acceptance_a)} to {length(cell.acceptance_b)}"
    return [
        cell.setting.name,
        str(cell.setting.num_speculative_tokens or NOTHING),
        cell.place.workload,
        cell.place.load,
        with_spread(cell.a),
        with_spread(cell.b),
        f"{factor_with_bounds(cell.ratio)} {'WORSE' if cell.slower else cell.verdict}",
        NOTHING if cell.acceptance_ratio is None else lengths + " WORSE" * cell.fewer_accepted,
    ]
