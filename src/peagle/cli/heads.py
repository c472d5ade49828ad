"""`peagle heads`: the heads that ship with the package."""

from __future__ import annotations

from peagle.cli import options, render
from peagle.cli.options import Json

COLUMNS = ("head", "method", "target", "K", "folder")


def heads(as_json: Json = False) -> None:
    """List the heads that ship with peagle."""
    rows = [
        (head.name, head.method, head.target, head.num_speculative_tokens, str(head.path))
        for head in options.shipped_heads()
    ]
    if as_json:
        keys = ("name", "method", "target", "num_speculative_tokens", "path")
        render.print_json([dict(zip(keys, row, strict=True)) for row in rows])
    elif rows:
        render.print_table("Shipped heads", COLUMNS, [[str(v) for v in row] for row in rows])
    else:
        render.note("no heads ship with this version; --spec-method ngram needs none")
