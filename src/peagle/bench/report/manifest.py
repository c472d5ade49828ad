"""What makes a figure repeatable: hardware, versions, command, commit, prompts, heads."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from peagle.bench.report.markup import details, table, text
from peagle.bench.results.document import Manifest

SHORT_HASH = 16  # characters; the results file has them whole


def manifest_block(manifest: Manifest) -> str:
    entries = "\n".join(
        f"<dt>{text(name)}</dt><dd>{value}</dd>" for name, value in _entries(manifest)
    )
    raw = json.dumps(manifest.provenance, indent=1, ensure_ascii=False)
    return "\n".join(
        [
            f'<dl class="manifest">\n{entries}\n</dl>',
            _workloads(manifest),
            _heads(manifest),
            details("The whole provenance record", f"<pre>{text(raw)}</pre>"),
        ]
    )


def machine(manifest: Manifest) -> str:
    """`NVIDIA H200, 143771 MiB`, or the CPU and its cores."""
    hardware = _mapping(manifest.provenance.get("hardware"))
    gpus = hardware.get("gpus") or []
    if manifest.device != "cpu" and gpus:
        return ", ".join(map(str, gpus))
    return f"{hardware.get('cpu', 'unknown CPU')}, {hardware.get('cores', '?')} cores"


def _entries(manifest: Manifest) -> Iterator[tuple[str, str]]:
    record = manifest.provenance
    hardware, versions = _mapping(record.get("hardware")), _mapping(record.get("versions"))
    yield "Target", text(manifest.model)
    yield "Backend", text(f"{manifest.backend}, {manifest.dtype} on {manifest.device}")
    yield "Hardware", text(machine(manifest))
    if "memory_gib" in hardware:
        yield "Memory", text(f"{hardware['memory_gib']} GiB")
    yield (
        "Sampling",
        text(
            f"temperature {manifest.temperature:g}, up to {manifest.max_tokens} tokens, "
            f"seed {manifest.seed}, {manifest.num_repeats} repeats"
        ),
    )
    yield "Versions", text(", ".join(f"{name} {version}" for name, version in versions.items()))
    yield "Commit", text(_commit(record.get("git")))
    yield "Time", text(record.get("time", "unknown"))
    yield "Command", f"<code>{text(_command(record.get('command')))}</code>"
    given = {key: value for key, value in manifest.settings.items() if value is not None}
    if given:
        yield "Settings", text(", ".join(f"{key} = {value}" for key, value in given.items()))


def _workloads(manifest: Manifest) -> str:
    rows = [
        [
            text(w.name),
            str(w.num_prompts),
            str(w.num_bad),
            "raw prompts" if w.raw else "chat template",
            f"<code>{text(w.sha256[:SHORT_HASH])}</code>",
        ]
        for w in manifest.workloads
    ]
    columns = ("workload", "prompts", "skipped rows", "given as", "SHA-256")
    return table(columns, rows, caption="Workloads", words=(3, 4)) if rows else ""


def _heads(manifest: Manifest) -> str:
    rows = [
        [
            text(head.reference),
            text(head.method),
            f"<code>{text((head.sha256 or 'unknown')[:SHORT_HASH])}</code>",
        ]
        for head in manifest.heads
    ]
    return table(("head", "method", "SHA-256"), rows, caption="Heads", words=(1, 2)) if rows else ""


def _commit(git: Any) -> str:
    state = _mapping(git)
    if not state:
        return "unknown (not run from a checkout)"
    return f"{state.get('commit')}{' with local changes' if state.get('dirty') else ''}"


def _command(command: Any) -> str:
    return shlex.join(map(str, command)) if isinstance(command, list) else str(command or "unknown")


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
