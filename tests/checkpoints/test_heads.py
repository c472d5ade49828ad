"""Heads are written whole and read exactly, or refused in one line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.checkpoints.heads import loading, references
from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.loading import load_head, save_head
from peagle.checkpoints.heads.references import list_heads, resolve_head
from peagle.config import SpeculativeConfig
from peagle.engine.loading import head_drafter, load_speculation
from peagle.errors import HeadError
from peagle.models.eagle import EagleNetwork
from peagle.models.head_config import HeadConfig
from peagle.models.target import TargetModel
from tests.tiny.models import UNEVEN

CPU = torch.device("cpu")
OWN_TABLES = {"has_embed_tokens": True, "has_lm_head": True}
REDUCED = {"draft_vocab_size": 23}
HEADS: dict[str, dict[str, Any]] = {
    "compact": {},
    "own-tables": OWN_TABLES,
    "own-output": {"has_lm_head": True},
    "reduced": REDUCED,
    "reduced-own-tables": {**OWN_TABLES, **REDUCED, "norm_before_residual": True},
    "eagle3": {"method": "eagle3", "norm_output": True, "mask_token_id": 3},
    "eagle3-reduced": {"method": "eagle3", "num_hidden_layers": 2, **REDUCED},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return UNEVEN.make_target(torch.float32)


@pytest.fixture
def folder(target: TargetModel, tmp_path: Path) -> Path:
    """A P-EAGLE head with everything that a head may have."""
    save_head(UNEVEN.make_head(target, **OWN_TABLES, **REDUCED), tmp_path / "head")
    return tmp_path / "head"


def load(folder: Path, target: TargetModel, dtype: torch.dtype = torch.float32) -> EagleNetwork:
    return load_head(str(folder), target, dtype=dtype, device=CPU)


def refused(folder: Path, target: TargetModel) -> HeadError:
    with pytest.raises(HeadError) as caught:
        load(folder, target)
    assert "\n" not in str(caught.value)
    return caught.value


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "config.json"
    options = json.loads(file.read_text())
    change(options)
    file.write_text(json.dumps(options))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_comes_back_bit_for_bit(name: str, target: TargetModel, tmp_path: Path) -> None:
    saved = UNEVEN.make_head(target, **HEADS[name])
    save_head(saved, tmp_path / "head")
    loaded = load(tmp_path / "head", target)
    assert loaded.config == saved.config
    assert torch.equal(loaded.target_ids, saved.target_ids)
    ours, theirs = dict(saved.named_parameters()), dict(loaded.named_parameters())
    assert ours.keys() == theirs.keys()
    for parameter, weight in theirs.items():
        assert torch.equal(weight, ours[parameter]), parameter
        assert not weight.requires_grad
    assert not any(b.is_meta for b in loaded.buffers())
    assert not loaded.training
    assert torch.equal(loaded.rotary.cos, saved.rotary.cos)


def test_a_loaded_head_can_be_saved_again(
    target: TargetModel, folder: Path, tmp_path: Path
) -> None:
    """Its matrices lie column by column in memory, which must not reach the file."""
    save_head(load(folder, target), tmp_path / "again")
    first, again = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert (folder / "config.json").read_text() == (tmp_path / "again/config.json").read_text()


def test_tensors_have_the_names_and_shapes_of_vllms_layout(folder: Path) -> None:
    layer = {
        "input_layernorm.weight": [32],
        "post_attention_layernorm.weight": [32],
        "self_attn.q_proj.weight": [24, 32],
        "self_attn.k_proj.weight": [12, 32],
        "self_attn.v_proj.weight": [12, 32],
        "self_attn.o_proj.weight": [32, 24],
        "mlp.gate_proj.weight": [24, 32],
        "mlp.up_proj.weight": [24, 32],
        "mlp.down_proj.weight": [32, 24],
    }
    first_layer = layer | {
        "hidden_norm.weight": [32],
        "self_attn.q_proj.weight": [24, 64],
        "self_attn.k_proj.weight": [12, 64],
        "self_attn.v_proj.weight": [12, 64],
    }
    wanted = {
        "fc.weight": [32, 96],
        "mask_hidden": [96],
        "mask_embedding": [32],
        "norm.weight": [32],
        "embed_tokens.weight": [59, 32],
        "lm_head.weight": [23, 32],
        "d2t": [23],
        **{f"layers.0.{name}": shape for name, shape in first_layer.items()},
        **{f"layers.1.{name}": shape for name, shape in layer.items()},
    }
    tensors = load_file(folder / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == wanted
    assert tensors["d2t"].dtype == torch.int64


def test_d2t_holds_offsets(target: TargetModel, folder: Path) -> None:
    d2t = load_file(folder / "model.safetensors")["d2t"]
    network = load(folder, target)
    assert network.target_ids.tolist() == [i + int(offset) for i, offset in enumerate(d2t)]


def test_a_head_saved_in_bfloat16_is_rounded_once(target: TargetModel, tmp_path: Path) -> None:
    saved = UNEVEN.make_head(target, **REDUCED)
    save_head(saved, tmp_path / "head", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "head/model.safetensors")
    assert {t.dtype for n, t in stored.items() if n != "d2t"} == {torch.bfloat16}
    assert stored["d2t"].dtype == torch.int64
    loaded = load(tmp_path / "head", target)
    for ours, theirs in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours.bfloat16().float(), theirs)


def test_a_head_loads_in_the_dtype_asked_for(target: TargetModel, folder: Path) -> None:
    loaded = load(folder, target, torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["reduced-own-tables", "eagle3"])
def test_each_tensor_must_be_there(name: str, target: TargetModel, tmp_path: Path) -> None:
    save_head(UNEVEN.make_head(target, **HEADS[name]), tmp_path / "head")
    file = tmp_path / "head/model.safetensors"
    tensors = {tensor: weight.clone() for tensor, weight in load_file(file).items()}
    for missing in tensors:
        save_file({n: t for n, t in tensors.items() if n != missing}, file)
        assert f"lacks {missing}" in refused(tmp_path / "head", target).message.replace(
            "1 of its tensors: ", ""
        )


@pytest.mark.parametrize("name", ["layers.2.mlp.up_proj.weight", "midlayer.hidden_norm.weight"])
def test_an_unknown_tensor_is_named(name: str, target: TargetModel, folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({name: torch.zeros(3)}))
    error = refused(folder, target)
    assert f"unknown tensor {name}" in error.message
    assert error.hint


def test_tables_that_the_config_does_not_promise_are_unknown(
    target: TargetModel, folder: Path
) -> None:
    change_config(folder, lambda c: c.update(has_embed_tokens=False))
    assert "unknown tensor embed_tokens.weight" in refused(folder, target).message


def test_mask_tensors_in_an_eagle3_head_are_unknown(target: TargetModel, folder: Path) -> None:
    change_config(folder, lambda c: c.update(method="eagle3"))
    assert "unknown tensor mask_" in refused(folder, target).message


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", (32, 64)),
        ("mask_hidden", (1, 96)),
        ("mask_embedding", (31,)),
        ("lm_head.weight", (59, 32)),
        ("layers.0.self_attn.q_proj.weight", (24, 32)),
        ("layers.1.self_attn.q_proj.weight", (24, 64)),
        ("d2t", (22,)),
    ],
)
def test_a_wrong_shape_is_named(
    name: str, shape: tuple[int, ...], target: TargetModel, folder: Path
) -> None:
    change_tensors(folder, lambda t: t.update({name: torch.zeros(shape, dtype=t[name].dtype)}))
    message = refused(folder, target).message
    assert name in message
    assert f"shape {list(shape)}, expected" in message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("d2t"), "lacks d2t"),
        (lambda t: t["d2t"].__setitem__(4, 59 - 4), "distinct ids below 59"),
        (lambda t: t["d2t"].__setitem__(4, -5), "distinct ids below 59"),
        (lambda t: t["d2t"].__setitem__(4, int(t["d2t"][5]) + 1), "distinct ids below 59"),
        (lambda t: t.update(d2t=t["d2t"].float()), "d2t is torch.float32"),
    ],
    ids=["missing", "too large", "negative", "twice", "floats"],
)
def test_a_wrong_vocabulary_map_is_refused(
    change: Any, named: str, target: TargetModel, folder: Path
) -> None:
    change_tensors(folder, change)
    assert named in refused(folder, target).message


def test_the_largest_ids_are_in_the_vocabulary(target: TargetModel, folder: Path) -> None:
    change_tensors(folder, lambda t: t["d2t"].copy_(torch.full((23,), 59 - 23)))
    assert load(folder, target).target_ids.tolist() == list(range(36, 59))


def test_a_map_beside_a_whole_vocabulary_must_change_nothing(
    target: TargetModel, tmp_path: Path
) -> None:
    save_head(UNEVEN.make_head(target), tmp_path / "head")
    change_tensors(tmp_path / "head", lambda t: t.update(d2t=torch.zeros(59, dtype=torch.int64)))
    assert load(tmp_path / "head", target).target_ids.tolist() == list(range(59))
    change_tensors(tmp_path / "head", lambda t: t["d2t"].__setitem__(0, 1))
    assert "d2t" in refused(tmp_path / "head", target).message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 48}, "hidden size 32 but the target has 48"),
        ({"vocab_size": 61}, "vocabulary 59 but the target has 61"),
        ({"num_hidden_layers": 3}, "number of layers 4 but the target has 3"),
    ],
)
def test_a_head_for_another_target_is_refused(
    changes: dict[str, int], named: str, folder: Path
) -> None:
    error = refused(folder, UNEVEN.make_target(torch.float32, **changes))
    assert named in error.message
    assert error.hint


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "broken"),
        ("", "broken"),
        ("[1]", "JSON object"),
        ("{}", "peagle_format"),
        ('{"peagle_format": 2}', "peagle_format=2"),
        ('{"peagle_format": 1}', "method"),
    ],
)
def test_a_broken_config_is_named(text: str, named: str, target: TargetModel, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    error = refused(folder, target)
    assert named in str(error)
    assert str(folder / "config.json") in error.message


def test_every_key_without_a_default_must_be_there(target: TargetModel, folder: Path) -> None:
    complete = json.loads((folder / "config.json").read_text())
    fields = dataclasses.fields(HeadConfig)
    have_defaults = {f.name for f in fields if f.default is not dataclasses.MISSING}
    assert len(have_defaults) < len(fields) / 2
    for key in complete.keys() - have_defaults - {"peagle_format"}:
        rest = {k: v for k, v in complete.items() if k != key}
        (folder / "config.json").write_text(json.dumps(rest))
        message = refused(folder, target).message
        assert f"'{key}'" in message
        assert str(folder) in message


def test_an_unknown_key_is_an_error_that_names_the_nearest(
    target: TargetModel, folder: Path
) -> None:
    change_config(folder, lambda c: c.update(norm_before_residul=True))
    error = refused(folder, target)
    assert "'norm_before_residul'" in error.message
    assert "'norm_before_residual'" in str(error.hint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", 32.0),
        ("hidden_size", None),
        ("hidden_size", True),
        ("num_hidden_layers", 0),
        ("rms_norm_eps", "small"),
        ("has_lm_head", 1),
        ("aux_hidden_state_layer_ids", 3),
        ("aux_hidden_state_layer_ids", [1, "2", 3]),
        ("aux_hidden_state_layer_ids", []),
        ("aux_hidden_state_layer_ids", [1, 2, 9]),
        ("rope_parameters", None),
        ("rope_parameters", [10000.0]),
        ("rope_parameters", {"rope_theta": "x"}),
        ("mask_token_id", "three"),
        ("method", "medusa"),
        ("method", ["p-eagle"]),
        ("num_speculative_tokens", 99),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(
    key: str, value: Any, target: TargetModel, folder: Path
) -> None:
    change_config(folder, lambda c: c.update({key: value}))
    named = "layer ids" if value == [1, 2, 9] else key
    assert named in refused(folder, target).message


def test_a_whole_number_serves_where_a_fraction_may_stand(folder: Path) -> None:
    change_config(folder, lambda c: c.update(rms_norm_eps=1))
    assert read_head_config(folder).rms_norm_eps == 1


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_weights_are_noticed(keep: int, target: TargetModel, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    error = refused(folder, target)
    assert str(file) in error.message
    assert "truncated" in error.message


def test_missing_weights_are_noticed(target: TargetModel, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert str(folder) in refused(folder, target).message


def test_a_crash_while_saving_leaves_nothing_behind(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading.json, "dumps", crash)  # after the weights, before the config
    with pytest.raises(KeyboardInterrupt):
        save_head(UNEVEN.make_head(target), tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_a_crash_while_saving_leaves_the_older_head_whole(
    target: TargetModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(loading.json, "dumps", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_head(UNEVEN.make_head(target, seed=9), folder)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_newer_head_replaces_the_older(target: TargetModel, folder: Path) -> None:
    newer = UNEVEN.make_head(target, "eagle3", seed=9)
    save_head(newer, folder)
    assert load(folder, target).config.method == "eagle3"
    assert sorted(f.name for f in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_drafter_of_the_heads_own_method_is_made(target: TargetModel, folder: Path) -> None:
    network = load(folder, target)
    for method in (None, "p-eagle"):
        config = SpeculativeConfig(method=method, model=str(folder))
        assert head_drafter(network, config).method == "p-eagle"
    speculation = load_speculation(SpeculativeConfig(model=str(folder)), target)
    assert speculation is not None
    assert speculation.is_auto
    fixed = SpeculativeConfig(model=str(folder), speculation="fixed")
    speculation = load_speculation(fixed, target)
    assert speculation is not None
    assert speculation.num_speculative_tokens == 5  # the head's advice


def test_asking_a_head_for_another_method_is_an_error(target: TargetModel, folder: Path) -> None:
    config = SpeculativeConfig(method="eagle3", model=str(folder))
    with pytest.raises(HeadError, match="is a head for p-eagle, not for eagle3") as caught:
        head_drafter(load(folder, target), config)
    assert caught.value.hint


def test_shipped_heads_are_listed_and_found_by_name(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references.resources, "files", lambda package: tmp_path)
    assert list_heads() == []
    save_head(UNEVEN.make_head(target, "eagle3"), tmp_path / "heads/b")
    save_head(UNEVEN.make_head(target), tmp_path / "heads/a")
    (tmp_path / "heads/no-head").mkdir()
    a, b = list_heads()
    assert a == ("a", tmp_path / "heads/a", "p-eagle", "tiny", 5)
    assert (b.name, b.method) == ("b", "eagle3")
    assert resolve_head("b") == tmp_path / "heads/b"
    assert load_head("a", target, dtype=torch.float32, device=CPU).config.method == "p-eagle"
    with pytest.raises(HeadError) as caught:
        resolve_head("c")
    assert "a, b" in str(caught.value.hint)


def test_a_folder_is_found_by_its_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_head(str(folder)) == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_head("~/head") == folder


@pytest.mark.parametrize("reference", ["nowhere", "a/b/c", "x" * 5000, "nul\0", ""])
def test_a_head_that_is_nowhere_is_one_line(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HeadError, match="no head") as caught:
        resolve_head(reference)
    assert caught.value.hint
