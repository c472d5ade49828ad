"""Where `peagle simulate` takes step times from: a measured table, or a shape and a GPU's peaks."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.bench.gpus import DTYPE_BYTES, Assumptions, Gpu, find_gpu
from peagle.bench.measured_costs import MeasuredCosts, measured_costs
from peagle.bench.results_file import RESULTS, from_json
from peagle.bench.shapes import DecoderShape, decoder_shape, drafter_shape
from peagle.bench.step_costs import RooflineCosts, StepCosts
from peagle.bench.validate import measured_table
from peagle.cli import render
from peagle.errors import ConfigError, DataError


def _assumed(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Assumptions")


@dataclass(frozen=True, kw_only=True)
class CostFlags:
    """Where step times come from: a measured table, or a shape and a GPU's peaks."""

    model: Annotated[
        str | None, typer.Option(help="Target: a folder, a config.json or smollm2-135m.")
    ] = None
    gpu: Annotated[str | None, typer.Option(help="h200, h100, a100, l4, b200 ...")] = None
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPE_BYTES))] = "bfloat16"
    draft_layers: Annotated[int | None, typer.Option(help="Default: 4 p-eagle, 1 eagle3.")] = None
    draft_vocab: Annotated[int | None, typer.Option(help="Default: the target's.")] = None
    costs: Annotated[
        Path | None, typer.Option(help="Instead: measured step times, or a folder of bench.")
    ] = None
    bandwidth_share: Annotated[float, _assumed("Of the GPU's peak, reading weights.")] = (
        Assumptions.bandwidth_share
    )
    cache_share: Annotated[float, _assumed("Of the GPU's peak, reading keys and values.")] = (
        Assumptions.cache_share
    )
    flops_share: Annotated[float, _assumed("Of the GPU's peak.")] = Assumptions.flops_share
    kernel_overhead: Annotated[float, _assumed("Seconds to start and end one.")] = (
        Assumptions.kernel_overhead
    )
    step_overhead: Annotated[float, _assumed("Seconds between two steps.")] = (
        Assumptions.step_overhead
    )

    def assumptions(self) -> Assumptions:
        return Assumptions(**{f.name: getattr(self, f.name) for f in fields(Assumptions)})


def step_costs(
    flags: CostFlags, methods: list[str], concurrencies: list[int], context: int
) -> tuple[StepCosts, list[str]]:
    """The costs that the flags ask for, and what a reader must know of them."""
    if flags.costs is not None:
        return _measured(flags.costs), [f"step times: measured, {flags.costs}"]
    if flags.model is None or flags.gpu is None:
        raise ConfigError("step costs are not known", hint="give --model and --gpu, or --costs")
    gpu, target = find_gpu(flags.gpu, flags.dtype), _shape(flags.model)
    drafters = {
        m: drafter_shape(m, target, num_layers=flags.draft_layers, vocab=flags.draft_vocab)
        for m in methods
    }
    costs = RooflineCosts(gpu, target, drafters, DTYPE_BYTES[flags.dtype], flags.assumptions())
    return costs, _notes(costs, gpu, flags, concurrencies, context)


def usual_concurrencies(flags: CostFlags) -> list[int]:
    """What to predict where the user does not say: what was measured, if anything was."""
    if flags.costs is None:
        return [1, 4, 16, 64]
    return sorted({step.concurrency for step in _measured(flags.costs).steps})


def measured_depths(flags: CostFlags) -> list[int] | None:
    """The K that were measured; None where step times are computed, for any K."""
    if flags.costs is None:
        return None
    return sorted({step.k for step in _measured(flags.costs).steps if step.k})


def _notes(
    costs: RooflineCosts, gpu: Gpu, flags: CostFlags, concurrencies: list[int], context: int
) -> list[str]:
    a = costs.assumed
    notes = [
        f"step times: computed, not measured, for {gpu.name}, {flags.dtype}",
        f"assumed: {a.bandwidth_share:.0%} of peak bandwidth for weights, {a.cache_share:.0%} for "
        f"keys and values, {a.flops_share:.0%} of peak products, {a.kernel_overhead * 1e6:g} us "
        f"more a kernel, {a.step_overhead * 1e6:g} us more a step",
    ]
    full = [n for n in concurrencies if not costs.fits(n, context)]
    if full:
        sizes = ", ".join(map(str, full))
        notes.append(f"does not fit the GPU's memory at context {context}: concurrency {sizes}")
    return notes


def _shape(model: str) -> DecoderShape:
    path = Path(model)
    if path.suffix != ".json":
        from peagle.checkpoints.builtin import BUILTIN_MODELS, ensure_builtin

        folder = ensure_builtin(model, progress=render.note) if model in BUILTIN_MODELS else path
        path = folder / "config.json"
    return decoder_shape(_read(path, "give a model folder or a config.json"), str(path))


def _measured(path: Path) -> MeasuredCosts:
    file = path / RESULTS if path.is_dir() else path
    document = _read(file, "give step times or an --out of peagle bench")
    if "manifest" in document:
        return measured_table(from_json(document, str(file)))
    return measured_costs(document, str(file))


def _read(path: Path, hint: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}", hint=hint) from None
    if not isinstance(document, dict):
        raise DataError(f"{path} is no JSON object", hint=hint)
    return document
