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
        int | None, typer.Option(help="Default: 4 p-eagle, 1 eagle3.", min=1)
    ] = None
    draft_vocab: Annotated[int | None, typer.Option(help="Default: the target's.", min=1)] = None
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
