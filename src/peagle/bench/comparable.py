"""Whether two result files speak of the same thing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peagle.bench.results import Manifest, Results


def unlike(a: Manifest, b: Manifest) -> list[str]:
    """Differences that make the figures speak of different things."""
    found = [
        f"{name} {old!r} and {new!r}"
        for name, old, new in (
            ("models", a.model, b.model),
            ("max_tokens", a.max_tokens, b.max_tokens),
            ("temperatures", a.temperature, b.temperature),
        )
        if old != new
    ]
    hashes_a = {w.name: w.sha256 for w in a.workloads}
    hashes_b = {w.name: w.sha256 for w in b.workloads}
    both = sorted(hashes_a.keys() & hashes_b.keys())
    found += [f"other prompts in {name}" for name in both if hashes_a[name] != hashes_b[name]]
    return found


def remarks(a: Results, b: Results) -> tuple[str, ...]:
    """Differences that may well be the point of the comparison, but must be seen."""
    remarks = [
        f"{name}: {old} and {new}"
        for name, old, new in (
            ("backends", a.manifest.backend, b.manifest.backend),
            ("dtypes", a.manifest.dtype, b.manifest.dtype),
            ("hardware", _machine(a.manifest), _machine(b.manifest)),
        )
        if old != new
    ]
    remarks += [f"{side} is partial" for side, r in (("A", a), ("B", b)) if r.partial]
    return tuple(remarks)


def _machine(manifest: Manifest) -> str:
    hardware: Mapping[str, Any] = manifest.provenance.get("hardware") or {}
    return ", ".join(hardware.get("gpus") or []) or str(hardware.get("cpu", "unknown"))
