"""Whether a grid may go on in a folder: figures of one table must have one origin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.bench.results import Manifest
from peagle.errors import ConfigError

# Of the provenance, what must not change between the runs of one table.
SAME_HARDWARE = ("cpu", "cores", "gpus")
SAME_VERSIONS = ("peagle", "torch", "vllm")


def joined(before: Manifest, now: Manifest, folder: Path) -> Manifest:
    """The manifest of a folder, extended by what a further grid adds; refused if they differ."""
    _refuse_other(before, now, folder)
    return replace(
        before,
        num_repeats=max(before.num_repeats, now.num_repeats),
        heads=_union(before.heads, now.heads),
        workloads=_union(before.workloads, now.workloads),
    )


def _refuse_other(before: Manifest, now: Manifest, folder: Path) -> None:
    """Numbers of two grids that differ in more than their cells make no table."""
    hint = "give another --out, or --overwrite to start anew"
    old, new = _identity(before), _identity(now)
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            raise ConfigError(
                f"{folder} was measured with {name} {old.get(name)!r}, not {new.get(name)!r}",
                hint=hint,
            )
    old, new = _contents(before), _contents(now)
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            raise ConfigError(f"{name} has changed since {folder} was begun", hint=hint)


def _identity(manifest: Manifest) -> dict[str, Any]:
    """What every run of one table shares."""
    names = ("model", "backend", "dtype", "device", "seed", "max_tokens", "temperature")
    hardware = manifest.provenance.get("hardware", {})
    versions = manifest.provenance.get("versions", {})
    return {
        **{name: getattr(manifest, name) for name in names},
        **manifest.settings,
        **{name: hardware.get(name) for name in SAME_HARDWARE},
        **{f"{name} version": versions.get(name) for name in SAME_VERSIONS},
    }


def _contents(manifest: Manifest) -> dict[str, str | None]:
    heads = {f"head {head.reference}": head.sha256 for head in manifest.heads}
    return heads | {f"workload {w.name}": w.sha256 for w in manifest.workloads}


def _union(before: list[Any], now: list[Any]) -> list[Any]:
    return [*before, *(entry for entry in now if entry not in before)]
