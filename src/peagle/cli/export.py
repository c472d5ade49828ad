"""`peagle export`: a head in the layout that vLLM or the speculators library reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from peagle.cli import render
from peagle.cli.flags import Json
from peagle.errors import ConfigError
from peagle.files import check_folder


def export(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A folder, an id or a name.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    to: Annotated[
        Literal["vllm", "speculators"],
        typer.Option(help="vLLM's raw layout, or one that `vllm serve OUT` alone runs."),
    ],
    model: Annotated[
        str | None, typer.Option(help="The target; default: the one that the head names.")
    ] = None,
    mask_token_id: Annotated[
        int | None,
        typer.Option(help="Token id of the mask; default: one that no text has.", min=0),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a head in OUT.")] = False,
    as_json: Json = False,
) -> None:
    """Write HEAD as a folder that vLLM loads unchanged."""
    from peagle.checkpoints.heads.config import read_head_config
    from peagle.checkpoints.heads.exporting import export_head
    from peagle.checkpoints.heads.references import resolve_head
    from peagle.checkpoints.heads.vllm_layout import UNNAMED_TARGET

    check_folder(out)
    named = read_head_config(resolve_head(head))
    target = model or named.target_model
    if target == UNNAMED_TARGET:
        raise ConfigError(f"{head} does not say which target it is for", hint="add --model MODEL")
    export_head(head, target, out, to, mask_token_id=mask_token_id, force=force)
    config = read_head_config(out)
    mask = "" if config.mask_token_id is None else f", mask token {config.mask_token_id}"
    render.note(f"{out}: {config.method} head for {target} in the {to} layout{mask}")
    if named.correction_size is not None:
        render.note(
            f"the correction stays behind, for the {to} layout has none: the tokens are the same, "
            "fewer drafts are accepted"
        )
    if as_json:
        document = {"path": str(out), "layout": to, "method": config.method, "target": target}
        render.print_json({**document, "mask_token_id": config.mask_token_id})
