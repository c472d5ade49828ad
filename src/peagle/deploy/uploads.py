"""Folders of this machine -> S3, each once.

A prefix is named after its content, so an object that is there with its size is the right one, and
an upload that was interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.backends.vllm.arguments import VllmServer, local_head
from peagle.backends.vllm.drafting import Export
from peagle.checkpoints.files import weight_files
from peagle.files import sha256_of

TARGET, HEAD = "target", "head"
UNWANTED = (".bin", ".pt", ".pth", ".gguf", ".py")  # other formats of the weights, and code


@dataclass(frozen=True)
class Upload:
    """One folder: a target or a head."""

    part: str
    folder: Path  # with an export: where that will lie
    identity: str
    export: Export | None = None  # to be done first
    target: Path | None = None  # a head's target, if it lies on this machine

    def prepare(self) -> None:
        """Exports a head to vLLM's layout, or checks one that has it."""
        if self.export is not None:
            self.export.run()
        elif self.part == HEAD:
            from peagle.checkpoints.heads.checks import check_head

            check_head(self.folder, self.target)

    def files(self) -> list[Path]:
        found = (f for f in self.folder.iterdir() if f.is_file() and not f.name.startswith("."))
        return sorted(f for f in found if f.suffix not in UNWANTED)


def plan_uploads(server: VllmServer) -> tuple[Upload, ...]:
    return tuple(_uploads(server))


def _uploads(server: VllmServer) -> Iterator[Upload]:
    target = Path(server.target.reference) if server.target.config is not None else None
    if target is not None:
        yield Upload(TARGET, target, _target_identity(target))
    export = server.drafting.export if server.drafting else None
    head = local_head(server.drafting)
    if export is not None:
        yield Upload(HEAD, export.out, export.out.name, export=export)
    elif head is not None:
        yield Upload(HEAD, head, _head_identity(head), target=target)


def _target_identity(folder: Path) -> str:
    """By sizes and times: a target's weights take minutes to hash."""
    files = [folder / "config.json", *weight_files(folder)]
    return " ".join(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)


def _head_identity(folder: Path) -> str:
    files = [folder / "config.json", *weight_files(folder)]
    return " ".join(sha256_of(file) for file in files)


def bucket_name(given: str, region: str) -> str:
    return given.removeprefix("s3://").rstrip("/").replace("{region}", region)


def upload(s3: Any, uploads: tuple[Upload, ...], uri: str, note: Callable[[str], None]) -> None:
    """Brings all files under `uri` that are not there yet."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    there = objects(s3, uri)
    missing = [
        (file, f"{prefix}{one.part}/{file.name}")
        for one in uploads
        for file in one.files()
        if there.get(f"{prefix}{one.part}/{file.name}") != file.stat().st_size
    ]
    for file, key in missing:
        note(f"uploading {file} to s3://{bucket}/{key} ({file.stat().st_size / 1e6:.1f} MB)")
        s3.upload_file(str(file), bucket, key)


def objects(s3: Any, uri: str) -> dict[str, int]:
    """Keys under a prefix, with sizes."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return {found["Key"]: found["Size"] for page in pages for found in page.get("Contents", ())}


def delete_objects(s3: Any, uri: str) -> int:
    """Deletes all under a prefix; how many there were. Parts of an upload that was killed are no
    object, but are paid for."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    keys = list(objects(s3, uri))
    for key in keys:
        s3.delete_object(Bucket=bucket, Key=key)
    pages = s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
    begun = [one for page in pages for one in page.get("Uploads", ())]
    for one in begun:
        s3.abort_multipart_upload(Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])
    return len(keys) + len(begun)
