"""`peagle env`: what a bug report and a benchmark need to say."""

from __future__ import annotations

from peagle.cli import render
from peagle.cli.flags import Json


def env(as_json: Json = False) -> None:
    """Show hardware, versions and commit."""
    from peagle.provenance import provenance

    record = provenance(probe_torch=True)
    if as_json:
        render.print_json(record)
        return
    for section, values in record.items():
        if not isinstance(values, dict):
            values = {"": values}
        for name, value in values.items():
            render.write(f"{f'{section} {name}'.strip():22} {_plain(value)}\n")


def _plain(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
