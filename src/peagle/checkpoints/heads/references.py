"""What a user may write for a head, and the local folder it stands for. Imports no torch."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from peagle.checkpoints.files import read_json
from peagle.checkpoints.heads.config import as_head_errors
from peagle.checkpoints.heads.layouts import CONFIG
from peagle.checkpoints.references import is_hub_id, resolve_config, resolve_model
from peagle.errors import HeadError


class HeadInfo(NamedTuple):
    """What a listing shows of a head; read without torch."""

    name: str
    path: Path
    method: str
    target: str
    num_speculative_tokens: int


def list_heads() -> list[HeadInfo]:
    """The heads that ship with the package."""
    shipped = Path(str(resources.files("peagle") / "heads"))
    folders = sorted(f.parent for f in shipped.glob(f"*/{CONFIG}"))
    return [_info(folder) for folder in folders]


def resolve_head(reference: str) -> Path:
    """A shipped head's name, a folder or a Hugging Face id -> the folder."""
    shipped = {head.name: head.path for head in list_heads()}
    if reference in shipped:
        return shipped[reference]
    folder = Path(reference).expanduser()
    if not os.path.isfile(folder / CONFIG):  # Path.is_file raises on names too long to exist
        if is_hub_id(reference):
            with as_head_errors():
                return resolve_model(reference)
        names = ", ".join(shipped) or "none ship yet"
        raise HeadError(
            f"no head {reference!r}",
            hint=f"give a folder with {CONFIG}, a Hugging Face id, or a shipped head ({names})",
        )
    return folder


def resolve_head_config(reference: str) -> Path:
    """As `resolve_head`, for config.json alone: weights are neither needed nor fetched."""
    shipped = {head.name: head.path for head in list_heads()}
    if reference in shipped:
        return shipped[reference]
    with as_head_errors():
        return resolve_config(reference)


def _info(folder: Path) -> HeadInfo:
    options = read_json(folder / CONFIG)
    return HeadInfo(
        folder.name,
        folder,
        options["method"],
        options["target_model"],
        options["num_speculative_tokens"],
    )
