"""`peagle heads`: the heads that ship with the package, and those that others released."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.cli import engines, render
from peagle.cli.flags import Json

COLUMNS = ("head", "method", "target", "K", "folder")
RELEASED_COLUMNS = ("model", "K", "head")


def heads(as_json: Json = False) -> None:
    """List the heads that ship with peagle, and released ones that vLLM serves by name."""
    from peagle.backends.vllm.released import released_models

    rows = [
        (head.name, head.method, head.target, head.num_speculative_tokens, str(head.path))
        for head in engines.shipped_heads()
    ]
    if as_json:
        keys = ("name", "method", "target", "num_speculative_tokens", "path")
        shipped = [dict(zip(keys, row, strict=True)) for row in rows]
        released = [
            {"name": m.head, "target": m.name, "num_speculative_tokens": m.num_speculative_tokens}
            | {"confirmed": m.confirmed}
            for m in released_models().values()
        ]
        render.print_json({"shipped": shipped, "released": released})
        return
    if rows:
        _print("Shipped heads", COLUMNS, rows)
    else:
        render.note("no heads ship with this version; --spec-method ngram needs none")
    listed = [
        (m.name, m.num_speculative_tokens, m.head if m.confirmed else f"{m.head} (not confirmed)")
        for m in released_models().values()
    ]
    _print("Released: peagle serve MODEL --backend vllm", RELEASED_COLUMNS, listed)


def _print(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    render.print_table(title, columns, [[str(value) for value in row] for row in rows])
