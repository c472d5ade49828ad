"""Every form of a model reference resolves, or fails in one line that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from safetensors.torch import save_file

from peagle.checkpoints import references
from peagle.checkpoints.references import load_config, load_tokenizer, resolve_model
from peagle.errors import ModelError

CONFIG = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
COMMIT = "0" * 40


def _write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    return folder


def _failure(reference: str, **options: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        resolve_model(reference, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_model_folder_resolves_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _write_model(tmp_path / "org" / "name")
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")  # an existing folder is no hub id
    assert resolve_model("./org/name").resolve() == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org/name") == folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_names_it(tmp_path: Path, name: str) -> None:
    (_write_model(tmp_path) / name).unlink()
    assert name in _failure(str(tmp_path)).message


def test_a_folder_with_pickled_weights_alone_is_refused(tmp_path: Path) -> None:
    (_write_model(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "convert it to safetensors" in str(_failure(str(tmp_path)).hint)


def test_a_file_or_a_missing_folder_is_refused(tmp_path: Path) -> None:
    folder = _write_model(tmp_path)
    assert "is a file" in _failure(str(folder / "model.safetensors")).message
    assert "there is no folder" in _failure(str(tmp_path / "none")).message


def test_a_misspelt_built_in_name_names_the_nearest_and_the_accepted_forms() -> None:
    hint = str(_failure("SmolLM2-135").hint)
    assert "did you mean smollm2-135m?" in hint
    assert "org/name" in hint


@pytest.mark.parametrize("reference", ["", " ", "gpt2", "a/b/c", "x" * 5000, "a\0b", "-x/y"])
def test_anything_else_is_told_what_is_accepted(reference: str) -> None:
    hint = str(_failure(reference).hint)
    assert "a Hugging Face id (org/name), or a built-in name: smollm2-135m" in hint


def test_a_built_in_name_wins_over_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_model(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    built = tmp_path / "built"
    monkeypatch.setattr(references, "ensure_builtin", lambda name: built)
    assert resolve_model("smollm2-135m") == built
    assert resolve_model("./smollm2-135m") == Path("smollm2-135m")


def test_a_revision_is_refused_where_there_are_none(tmp_path: Path) -> None:
    for reference in ("smollm2-135m", str(_write_model(tmp_path))):
        assert "'v1'" in _failure(reference, revision="v1").message


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache that holds org/cached, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--cached"
    snapshot = _write_model(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("local_files_only", [True, False])
def test_a_cached_hub_model_works_offline(hub_cache: Path, local_files_only: bool) -> None:
    assert resolve_model("org/cached", local_files_only=local_files_only) == hub_cache


def test_a_hub_model_that_is_not_cached_says_so_offline(hub_cache: Path) -> None:
    error = _failure("org/absent")
    assert "org/absent is not in the Hugging Face cache" in error.message
    assert "HF_HUB_OFFLINE" in str(error.hint)


def test_a_partly_cached_hub_model_is_noticed(hub_cache: Path) -> None:
    (hub_cache / "model.safetensors").unlink()
    assert "has no weights" in _failure("org/cached").message


def _hub_http_error(kind: type[Exception]) -> Exception:
    """The hub's HTTP errors want a response to be made; what we read of them does not."""
    error = kind.__new__(kind)
    error.args = ("404\nlong\nstory",)
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_hub_http_error(errors.GatedRepoError), "gated"),
        (_hub_http_error(errors.RepositoryNotFoundError), "no folder and no Hugging Face model"),
        (_hub_http_error(errors.RevisionNotFoundError), "no revision 'v1'"),
        (errors.LocalEntryNotFoundError("first\nsecond"), "hub was not reached"),
        (ConnectionError("proxy says no\nmore"), "cannot download org/name: proxy says no"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (TimeoutError(), "cannot download org/name: TimeoutError"),
    ],
)
def test_each_failure_of_the_hub_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert words in _failure("org/name", revision="v1").message


def test_only_weights_and_texts_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    kept: list[str] = []
    repository = [
        *("config.json", "model-1.safetensors", "chat_template.jinja", "merges.txt"),
        *("tokenizer.model", "pytorch_model.bin", "modeling.py", "original/x.json", "a.gguf"),
        *("consolidated.safetensors", "onnx/model.onnx", "README.md"),
    ]

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: object):
        kept.extend(
            filter_repo_objects(
                repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        return str(_write_model(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == tmp_path
    assert kept == repository[:5]


def test_load_config_reads_the_folder(tmp_path: Path) -> None:
    assert load_config(_write_model(tmp_path)).hidden_size == 8


@pytest.mark.parametrize(
    "content", ["{", '{"model_type": "no-such-type"}', '{"auto_map": {"AutoConfig": "c.C"}}']
)
def test_a_config_that_cannot_be_used_is_a_users_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "c.py").write_text("raise SystemExit('code of the model was run')")
    with pytest.raises(ModelError, match=r"cannot use .*config\.json"):
        load_config(tmp_path)


def _no_tokenizer(folder: Path) -> None:
    pass


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": ')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@pytest.mark.parametrize("prepare", [_no_tokenizer, _broken_tokenizer])
def test_a_missing_or_broken_tokenizer_is_a_users_error(
    tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    prepare(_write_model(tmp_path))
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path)


def test_importing_references_loads_nothing_heavy() -> None:
    code = "import sys, peagle.checkpoints.references; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "numpy", "safetensors", "huggingface_hub", "gguf"}
    assert not set(done.stdout.split()) & heavy
