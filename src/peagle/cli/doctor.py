"""`peagle doctor`: finds what silently costs acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peagle.cli import render
from peagle.cli.flags import Json, expand_flags
from peagle.cli.flags.answers import template_kwargs
from peagle.cli.flags.engine import EngineFlags
from peagle.errors import ConfigError


@expand_flags
def doctor(
    engine: EngineFlags,
    pair: Annotated[
        str | None,
        typer.Argument(metavar="[HEAD]", help="A head whose config is held against the target's."),
    ] = None,
    *,
    model: Annotated[str, typer.Option(help="The target that is served.")],
    data: Annotated[Path | None, typer.Option(help="A folder of peagle prepare.")] = None,
    head: Annotated[str | None, typer.Option(help="A head for this target.")] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(help="Variables of the chat template, as served.", metavar="JSON"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check data and head against the target they are for. Exit code 1 if something is wrong.

    `peagle doctor HEAD --model TARGET` reads the two configs alone: what fits, by what the target
    runs, and the memory that both need. With --head and --data the weights are examined, too.
    """
    if data is None and head is None and pair is None:
        raise ConfigError("there is nothing to examine", hint="give HEAD, --data, --head or both")
    from peagle.checkpoints.references import resolve_config, resolve_model
    from peagle.doctor import Finding, examine_configs, examine_data, examine_head, guarded

    # A wrong name is the user's error, not a finding.
    (resolve_config if data is None and head is None else resolve_model)(model)
    findings: list[Finding] = []
    if pair is not None:
        findings += guarded("head", examine_configs(pair, model))
    if data is not None:
        served = template_kwargs(chat_template_kwargs)
        findings += guarded("data", examine_data(data, model, served))
    if head is not None:
        findings += guarded("head", examine_head(head, model, engine.config(), data))
    for finding in findings:
        render.write(f"{finding.level:8} {finding.check}: {finding.message}\n")
        if finding.hint:
            render.write(f"         hint: {finding.hint}\n")
    if as_json:
        render.print_json([finding._asdict() for finding in findings])
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)
