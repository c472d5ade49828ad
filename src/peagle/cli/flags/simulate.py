"""Where `peagle simulate` takes step times from: a measured table, or a shape and a GPU's peaks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.bench.simulate.roofline import DTYPE_BYTES, Assumptions


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
    draft_layers: Annotated[
        int | None,
        typer.Option(help="Layers of the drafter; default: p-eagle 4, eagle3 1.", min=1),
    ] = None
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="Size of the drafter's vocabulary; default: the target's.", min=1),
    ] = None
    costs: Annotated[
        Path | None, typer.Option(help="Measured step times, or bench results, instead.")
    ] = None
    bandwidth_share: Annotated[float, _assumed("Share of peak bandwidth when reading weights.")] = (
        Assumptions.bandwidth_share
    )
    cache_share: Annotated[
        float, _assumed("Share of peak bandwidth when reading the KV cache.")
    ] = Assumptions.cache_share
    flops_share: Annotated[float, _assumed("Share of the peak FLOPS that is reached.")] = (
        Assumptions.flops_share
    )
    kernel_overhead: Annotated[float, _assumed("Seconds to launch and finish a kernel.")] = (
        Assumptions.kernel_overhead
    )
    step_overhead: Annotated[float, _assumed("Seconds between two steps.")] = (
        Assumptions.step_overhead
    )

    def assumptions(self) -> Assumptions:
        return Assumptions(**{f.name: getattr(self, f.name) for f in fields(Assumptions)})
