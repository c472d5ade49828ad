"""What makes a figure repeatable: hardware, versions, command, commit, prompts, heads."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from peagle.bench.report.markup import command, details, table, text
from peagle.bench.results.document import Manifest
from peagle.bench.results.figures import count, counted

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
    """`NVIDIA H200, 140 GiB`, or the CPU and its cores."""
    hardware = _mapping(manifest.provenance.get("hardware"))
    gpus = [_gpu(str(gpu)) for gpu in hardware.get("gpus") or []]
    if manifest.device != "cpu" and gpus:
        alike = len(gpus) > 1 and len(set(gpus)) == 1
        return f"{len(gpus)} x {gpus[0]}" if alike else ", ".join(gpus)
    return f"{hardware.get('cpu', 'unknown CPU')}, {hardware.get('cores', '?')} cores"


def _gpu(listed: str) -> str:
    """As the driver's tool lists it, `NVIDIA H200, 143771 MiB`, in the units of everything else."""
    name, _, memory = listed.partition(",")
    size = memory.removesuffix("MiB").strip()
    return f"{name}, {int(size) / 1024:.0f} GiB" if size.isdigit() else listed


def measured_at(manifest: Manifest) -> str:
    """`15 November 2026, 16:36 UTC`."""
    try:
        moment = datetime.fromisoformat(str(manifest.provenance.get("time", "")))
    except ValueError:
        return str(manifest.provenance.get("time", "unknown"))
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC)
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"


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
            f"seed {manifest.seed}, {counted(manifest.num_repeats, 'repeat')}"
        ),
    )
    yield "Versions", text(", ".join(f"{name} {version}" for name, version in versions.items()))
    yield "Commit", text(_commit(record.get("git")))
    yield "Time", text(measured_at(manifest))
    yield "Command", command(_command(record.get("command")))
    given = {key: value for key, value in manifest.settings.items() if value is not None}
    if given:
        yield "Settings", text(", ".join(f"{key} = {value}" for key, value in given.items()))


def _workloads(manifest: Manifest) -> str:
    rows = [
        [
            text(w.name),
            count(w.num_prompts),
            count(w.num_bad),
            "raw prompts" if w.raw else "chat template",
            f"<code>{text(w.sha256[:SHORT_HASH])}</code>",
        ]
        for w in manifest.workloads
    ]
    columns = ("workload", "prompts", "skipped rows", "given as", "SHA-256")
    return table(columns, rows, caption="Workloads", kind="grid", words=(3, 4)) if rows else ""


def _heads(manifest: Manifest) -> str:
    rows = [
        [
            text(head.reference),
            text(head.method),
            f"<code>{text((head.sha256 or 'unknown')[:SHORT_HASH])}</code>",
        ]
        for head in manifest.heads
    ]
    columns = ("head", "method", "SHA-256")
    return table(columns, rows, caption="Heads", kind="grid", words=(1, 2)) if rows else ""


def _commit(git: Any) -> str:
    state = _mapping(git)
    if not state:
        return "unknown (not run from a checkout)"
    return f"{state.get('commit')}{' with local changes' if state.get('dirty') else ''}"


def _command(words: Any) -> str:
    return shlex.join(map(str, words)) if isinstance(words, list) else str(words or "unknown")


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
