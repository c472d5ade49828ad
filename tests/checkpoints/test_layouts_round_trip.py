"""A head that goes to vLLM's layout or to the speculators layout comes back bit for bit."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.exporting import export_head
from peagle.config import SpeculativeConfig
from peagle.engine.loading import head_drafter
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from tests.checkpoints.foreign_heads import MASK, load, native, target_of
from tests.models.serving import make_texts, serve
from tests.tiny.models import ROPE, UNEVEN, save_reference

Layout = Literal["vllm", "speculators"]
LAYOUTS: tuple[Layout, ...] = ("vllm", "speculators")
SWITCHES = ("norm_before_residual", "fc_norm", "attention_bias", "mlp_bias", "norm_output")
TABLES = ("has_embed_tokens", "has_lm_head")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_reference(folder)
    return folder


@pytest.fixture(scope="module")
def target(model: Path) -> TargetModel:
    return target_of(model)


def export(head: Path, model: Path, out: Path, layout: Layout) -> Path:
    is_parallel = read_head_config(head).method == "p-eagle"
    export_head(str(head), str(model), out, layout, mask_token_id=MASK if is_parallel else None)
    return out


def assert_equal(ours: EagleNetwork, theirs: EagleNetwork) -> None:
    mask = MASK if ours.config.method == "p-eagle" else None
    assert dataclasses.replace(ours.config, mask_token_id=mask) == theirs.config
    assert torch.equal(ours.target_ids, theirs.target_ids)
    expected: dict[str, Tensor] = dict(ours.named_parameters())
    found = dict(theirs.named_parameters())
    if mask is not None and ours.embed_tokens is not None:  # the one row that an export gives away
        table = expected["embed_tokens.weight"].clone()
        table[mask] = ours.mask_embedding
        expected["embed_tokens.weight"] = table
    assert expected.keys() == found.keys()
    for name, parameter in expected.items():
        assert torch.equal(parameter, found[name]), name


@pytest.mark.slow
@given(
    layout=st.sampled_from(LAYOUTS),
    method=st.sampled_from(("p-eagle", "eagle3")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    switches=st.sets(st.sampled_from((*SWITCHES, *TABLES))),
    sizes=st.fixed_dictionaries(
        {
            "draft_vocab_size": st.sampled_from((23, 59)),
            "num_hidden_layers": st.integers(1, 3),
            "max_position_embeddings": st.sampled_from((64, 128, 256)),
            "num_speculative_tokens": st.integers(1, 4),
            "max_speculative_tokens": st.integers(4, 9),
            "rope_parameters": st.sampled_from((ROPE, YARN)),
        }
    ),
)
@settings(max_examples=30, deadline=None)
def test_any_head_comes_back(
    layout: Layout,
    method: str,
    dtype: torch.dtype,
    switches: set[str],
    sizes: dict[str, Any],
    model: Path,
    target: TargetModel,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        changes = {"method": method, **dict.fromkeys(switches, True), **sizes}
        head = native(Path(folder) / "head", target, dtype, **changes)
        out = export(head, model, Path(folder) / "out", layout)
        assert_equal(load(head, target), load(out, target))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_drafts_are_the_same(
    method: str, layout: Layout, model: Path, target: TargetModel, tmp_path: Path
) -> None:
    head = native(tmp_path / "head", target, torch.bfloat16, method=method, draft_vocab_size=23)
    out = export(head, model, tmp_path / "out", layout)
    texts = make_texts([12, 20], 96)
    served = []
    for folder in (head, out):
        drafter = head_drafter(load(folder, target), SpeculativeConfig(model=str(folder)))
        served.append(serve(drafter, texts, 4))
    assert len(served[0]) > 5
    for ours, theirs in zip(*served, strict=True):
        assert ours.drafted == theirs.drafted
        torch.testing.assert_close(ours.logits, theirs.logits)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_an_exported_head_can_be_exported_again(
    first: Layout, layout: Layout, model: Path, target: TargetModel, tmp_path: Path
) -> None:
    """Without being told the mask id: it is the one that the export chose."""
    head = native(tmp_path / "head", target, None, draft_vocab_size=23)
    once = export(head, model, tmp_path / "once", first)
    export_head(str(once), str(model), tmp_path / "twice", layout)
    assert_equal(load(head, target), load(tmp_path / "twice", target))
    direct = export(head, model, tmp_path / "direct", layout)
    ours, theirs = (load_file(f / "model.safetensors") for f in (direct, tmp_path / "twice"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert (direct / "config.json").read_text() == (tmp_path / "twice/config.json").read_text()


def test_the_targets_rows_keep_the_targets_precision(
    model: Path, target: TargetModel, tmp_path: Path
) -> None:
    """A bfloat16 head for a float32 target: rounding its copies would change float32 drafts."""
    head = native(tmp_path / "head", target, torch.bfloat16, draft_vocab_size=23)
    stored = load_file(export(head, model, tmp_path / "out", "vllm") / "model.safetensors")
    rows = load_file(model / "model.safetensors")
    expected = rows["model.embed_tokens.weight"].clone()
    expected[MASK] = load_file(head / "model.safetensors")["mask_embedding"].float()
    assert torch.equal(stored["embed_tokens.weight"], expected)
    ids = torch.arange(23) + stored["d2t"]
    assert torch.equal(stored["lm_head.weight"], rows["lm_head.weight"][ids])
    assert stored["fc.weight"].dtype == torch.bfloat16


def test_a_head_for_another_target_with_other_rows_is_refused(
    model: Path, target: TargetModel, tmp_path: Path
) -> None:
    head = native(tmp_path / "head", target, None)
    out = export(head, model, tmp_path / "out", "vllm")
    other = target_of(model)
    with torch.no_grad():
        other.embed_tokens.weight[58, 3] += 1e-3
    with pytest.raises(ValueError, match=r"embed_tokens.weight is marked as a copy"):
        load(out, other)
    options = json.loads((out / "config.json").read_text())
    del options["peagle"]  # as the error's hint says: then the copy is the head's own table
    (out / "config.json").write_text(json.dumps(options))
    assert load(out, other).config.has_embed_tokens


def test_the_rows_of_a_tied_target_are_found(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    save_reference(tmp_path / "m", LlamaConfig(**UNEVEN.target | {"tie_word_embeddings": True}))
    target = target_of(tmp_path / "m")
    head = native(tmp_path / "head", target, None, draft_vocab_size=23)
    out = export(head, tmp_path / "m", tmp_path / "out", "vllm")
    assert_equal(load(head, target), load(out, target))
