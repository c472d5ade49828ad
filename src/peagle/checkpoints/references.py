"""What a user may write for a model, and the local folder it stands for.

Heavy libraries are imported inside functions: `peagle heads` and `peagle env` must be quick.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.checkpoints.builtin import BUILTIN_MODELS, Progress, ensure_builtin
from peagle.checkpoints.files import weight_files
from peagle.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# No *.bin and no *.py: we run no code that a model brings along.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
# Subfolders hold other formats of the same weights, and Mistral's consolidated files a copy.
_UNWANTED = ["*/*", "consolidated*"]


def resolve_model(
    reference: str,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The folder, with config.json and all weights, that a model reference stands for.

    A built-in name wins over a folder of that name: write `./NAME` for the folder. An existing
    folder wins over a Hugging Face id. `revision` belongs to Hugging Face ids alone. `progress`
    hears of the long steps of building a built-in model; without it they are logged as info.
    """
    if reference in BUILTIN_MODELS:
        _refuse_revision(reference, revision)
        return ensure_builtin(reference, progress=progress)
    if _looks_like_path(reference):
        _refuse_revision(reference, revision)
        return _checked(Path(reference).expanduser())
    if is_hub_id(reference):
        return _checked(_from_hub(reference, revision, local_files_only))
    raise ModelError(f"no model {reference!r}", hint=_accepted_forms(reference))


def same_target(recorded: str, model: str) -> bool:
    """Two references, one of which may be the folder that the other stands for."""
    return recorded == model or Path(recorded) == resolve_model(model)


def resolve_config(reference: str) -> Path:
    """A folder with config.json, that a reference to a model or a head stands for; its weights
    need not be there and are not fetched."""
    if reference in BUILTIN_MODELS:
        return ensure_builtin(reference)
    if is_hub_id(reference):
        return _from_hub(reference, None, local_files_only=False, wanted=["*.json"])
    folder = Path(reference).expanduser()
    if not os.path.isfile(folder / "config.json"):
        raise ModelError(f"{folder} has no config.json", hint=_accepted_forms(reference))
    return folder


def is_hub_id(reference: str) -> bool:
    """Whether it reads as `org/name`, and no folder of that name exists."""
    return not _looks_like_path(reference) and _HUB_ID.fullmatch(reference) is not None


def load_config(folder: Path) -> PretrainedConfig:
    """The transformers config of a model folder, of a multimodal model that of its text model;
    never runs code from it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return config.get_text_config(decoder=True)
    except Exception as error:  # transformers raises whatever the file's content leads to
        raise ModelError(f"cannot use {folder / 'config.json'}: {first_line(error)}") from error


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, with its chat template; never runs code from it.

    A RustTokenizer or transformers' own: both give the same ids and texts.
    """
    from peagle.checkpoints.rust_tokenizer import read_rust_tokenizer

    fast = read_rust_tokenizer(folder)
    if fast is not None:
        return fast
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # as above, and the Rust library's bare Exception
        raise ModelError(
            f"cannot load the tokenizer in {folder}: {first_line(error)}",
            hint="the folder needs tokenizer.json and tokenizer_config.json",
        ) from error


def _looks_like_path(reference: str) -> bool:
    # os.path, because Path("") is "." and Path.exists raises on names too long to exist.
    return reference.startswith((".", "~", os.sep)) or os.path.exists(reference)


def _checked(folder: Path) -> Path:
    """The folder, if nothing that loading needs is missing from it."""
    if folder.is_file():
        raise ModelError(f"{folder} is a file", hint="give the folder with config.json")
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder}", hint=_accepted_forms(str(folder)))
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json", hint="give a folder that save_pretrained wrote"
        )
    weight_files(folder)
    return folder


def _from_hub(
    repository: str,
    revision: str | None,
    local_files_only: bool,
    wanted: Sequence[str] = _WANTED,
) -> Path:
    """Downloads, or takes from the Hugging Face cache where the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                local_files_only=local_files_only,
                allow_patterns=list(wanted),
                ignore_patterns=_UNWANTED,
            )
        )
    except Exception as error:  # the hub's own errors, the HTTP library's, the system's
        raise _hub_error(repository, revision, error) from error


def _hub_error(repository: str, revision: str | None, error: Exception) -> ModelError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{repository} is gated on Hugging Face",
            hint="accept its terms on its page, then run `hf auth login`",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"no folder and no Hugging Face model {repository!r}",
            hint="check the spelling; a private one needs `hf auth login`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{repository} has no revision {revision!r}")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return ModelError(
            f"{repository} is not in the Hugging Face cache, and the hub was not reached",
            hint="check the network, HF_HUB_OFFLINE and HF_HOME, or give a local folder",
        )
    return ModelError(
        f"cannot download {repository}: {first_line(error)}",
        hint="check the network and the free disk space; a second run goes on where this ended",
    )


def _refuse_revision(reference: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelError(
            f"revision {revision!r} makes no sense for {reference}",
            hint="only Hugging Face ids have revisions",
        )


def _accepted_forms(reference: str) -> str:
    forms = "a folder, a Hugging Face id (org/name), or a built-in name"
    nearest = difflib.get_close_matches(Path(reference).name.lower(), BUILTIN_MODELS, n=1)
    names = ", ".join(BUILTIN_MODELS)
    return f"did you mean {nearest[0]}? Give {forms}" if nearest else f"give {forms}: {names}"


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
