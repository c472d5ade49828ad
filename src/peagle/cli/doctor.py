"""`peagle doctor`: finds what silently costs acceptance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli import render
from peagle.cli.flags import Json, expand_flags
from peagle.cli.flags.engine import EngineFlags
from peagle.errors import ConfigError


@expand_flags
def doctor(
    engine: EngineFlags,
    model: Annotated[str, typer.Option(help="The target that is served.")],
    data: Annotated[Path | None, typer.Option(help="A dataset of peagle prepare.")] = None,
    head: Annotated[str | None, typer.Option(help="A head for this target.")] = None,
    as_json: Json = False,
) -> None:
    """Check data and head against the target they are for. Exit code 1 if something is wrong."""
    if data is None and head is None:
        raise ConfigError("there is nothing to examine", hint="give --data, --head or both")
    from peagle.checkpoints.references import resolve_model
    from peagle.doctor import Finding, examine_data, examine_head, guarded

    resolve_model(model)  # a wrong name is the user's error, not a finding
    examined: list[Iterator[Finding]] = []
    if data is not None:
        examined.append(guarded("data", examine_data(data, model)))
    if head is not None:
        examined.append(guarded("head", examine_head(head, model, engine.config(), data)))
    findings: list[Finding] = []
    for finding in itertools.chain(*examined):  # each is shown when it is found
        findings.append(finding)
        render.write(f"{finding.level:8} {finding.check}: {finding.message}\n")
        if finding.hint:
            render.write(f"         hint: {finding.hint}\n")
    if as_json:
        render.print_json([finding._asdict() for finding in findings])
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)
