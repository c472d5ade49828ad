"""Native heads in vLLM's layout, kept in the cache: exported once per head and target."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import peagle
from peagle.backends.vllm_models import Head, Target
from peagle.cache import cache_folder
from peagle.checkpoints.builtin import BUILTIN_MODELS
from peagle.checkpoints.download import sha256_of
from peagle.checkpoints.files import WEIGHTS, weight_files
from peagle.checkpoints.layouts import CONFIG, ForeignLayout

LAYOUT: ForeignLayout = "vllm"


@dataclass(frozen=True, kw_only=True)
class Export:
    """A head that has to be written in vLLM's layout before vLLM starts."""

    head: str
    target: str
    out: Path

    @property
    def command(self) -> str:
        words = ["peagle", "export", self.head, str(self.out), "--to", LAYOUT]
        return shlex.join([*words, "--model", self.target])

    @property
    def done(self) -> bool:
        return (self.out / CONFIG).is_file()  # folders are renamed into place whole

    def run(self) -> None:
        from peagle.checkpoints.exporting import export_head

        if not self.done:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            export_head(self.head, self.target, self.out, LAYOUT, force=True)


def plan_export(head: Head, target: Target) -> Export:
    """Where the export of this head for this target lies; another version of either, elsewhere."""
    digest = hashlib.sha256("\0".join(_identity(Path(head.reference), target)).encode())
    name = f"{Path(head.reference).name}-{digest.hexdigest()[:16]}"
    return Export(
        head=head.reference,
        target=target.served_name or target.reference,
        out=cache_folder() / "exports" / name,
    )


def _identity(head: Path, target: Target) -> Iterator[str]:
    yield peagle.__version__
    yield from (sha256_of(head / name) for name in (CONFIG, WEIGHTS) if (head / name).is_file())
    yield target.given
    if target.given in BUILTIN_MODELS:
        yield BUILTIN_MODELS[target.given].gguf_sha256
    elif target.config is not None:  # a folder: its tables go into the export
        for file in weight_files(Path(target.reference)):
            status = file.stat()
            yield f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"
