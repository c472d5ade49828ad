"""`peagle env`: what a bug report and a benchmark need to say."""

from __future__ import annotations

from importlib import metadata

from peagle.cli import render
from peagle.cli.flags import Json
from peagle.errors import BackendError


def env(as_json: Json = False) -> None:
    """Show hardware, versions, commit, and what the engines find on this machine."""
    from peagle.provenance import provenance

    record = provenance(probe_torch=True) | {"engines": _engines()}
    if as_json:
        render.print_json(record)
        return
    for section, values in record.items():
        if not isinstance(values, dict):
            values = {"": values}
        for name, value in values.items():
            render.write(f"{f'{section} {name}'.strip():22} {_plain(value)}\n")


def _engines() -> dict[str, str | None]:
    """What decides how fast this machine is, and where things are kept."""
    from peagle.backends.vllm.install import find_vllm
    from peagle.cache import cache_folder
    from peagle.kernels.cpu.library import compiler_command, cpu_library

    try:
        found = find_vllm()
        vllm = f"{found.version} ({found.program[0]})"
    except BackendError as error:
        vllm = error.message
    compiler = compiler_command()
    return {
        "cpu kernels": "C, compiled" if cpu_library() is not None else "torch's own operations",
        "compiler": None if compiler is None else " ".join(compiler),
        "triton": _version("triton"),
        "vllm": vllm,
        "cache folder": str(cache_folder()),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _plain(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
