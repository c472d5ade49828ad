"""The page at /: one HTML file with its own style and script, and a policy that allows no more."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

FILE = Path(__file__).with_name("page.html")
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@functools.cache
def page() -> tuple[str, str]:
    """The page, and the Content-Security-Policy under which it works."""
    html = FILE.read_text(encoding="utf-8")
    hashes = {kind: _hash(content) for kind, content in INLINE.findall(html)}
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return html, policy


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
