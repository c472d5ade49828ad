"""An exported folder says everything that vLLM reads, and nothing that vLLM would misread."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peagle.checkpoints.heads.exporting import choose_mask_token, export_head
from peagle.errors import HeadError, PeagleError
from peagle.models.target import TargetModel
from tests.checkpoints.foreign_heads import MASK, native, raw_config, raw_tensors, target_of, write
from tests.tiny.folders import byte_tokenizer
from tests.tiny.models import ROPE, UNEVEN, save_reference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_reference(folder)
    return folder


@pytest.fixture(scope="module")
def target(model: Path) -> TargetModel:
    return target_of(model)


def export(head: Path, model: Path, out: Path, layout: Any = "vllm", **options: Any) -> Path:
    export_head(str(head), str(model), out, layout, **{"mask_token_id": MASK} | options)
    return out


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def test_a_correction_stays_behind(model: Path, target: TargetModel, tmp_path: Path) -> None:
    head = native(tmp_path / "head", target, torch.bfloat16, correction_size=8)
    bare = native(tmp_path / "bare", target, torch.bfloat16)
    assert (head / "correction.safetensors").is_file()
    out, expected = (export(h, model, tmp_path / "out" / h.name) for h in (head, bare))
    assert sorted(f.name for f in out.iterdir()) == ["config.json", "model.safetensors"]
    assert config_of(out) == config_of(expected)
    ours, theirs = (load_file(f / "model.safetensors") for f in (out, expected))
    assert ours.keys() == theirs.keys()


def test_vllms_config_leaves_no_default_to_vllm(
    model: Path, target: TargetModel, tmp_path: Path
) -> None:
    head = native(tmp_path / "head", target, torch.bfloat16, draft_vocab_size=23)
    aux_hidden_states = [1, 2, 4]
    assert config_of(export(head, model, tmp_path / "out")) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPE,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "logit_scale": 1.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": 59,
        "draft_vocab_size": 23,
        "target_hidden_size": 32,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": aux_hidden_states,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": False,
            "eagle_aux_hidden_state_layer_ids": aux_hidden_states,
        },
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "mask_token_id": MASK,
        "pard_token": MASK,
        "ptd_token_id": MASK,
        "peagle": {
            "target_model": "tiny",
            "target_num_hidden_layers": 4,
            "max_position_embeddings": 128,
            "max_speculative_tokens": 8,
            "num_speculative_tokens": 5,
            "has_embed_tokens": False,
            "has_lm_head": False,
        },
    }


def test_the_speculators_config_names_the_target(
    model: Path, target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM resolves a relative path from wherever it is started."""
    monkeypatch.chdir(model.parent)
    head = native(tmp_path / "head", target, None, fc_norm=True)
    config = config_of(export(head, Path(model.name), tmp_path / "out", "speculators"))
    assert "model_type" not in config
    assert config["speculators_model_type"] == "peagle"
    spec = config["speculators_config"]
    assert spec["algorithm"] == "peagle"
    assert spec["proposal_methods"][0]["speculative_tokens"] == 5
    assert spec["verifier"] == {"name_or_path": str(model), "architectures": ["LlamaForCausalLM"]}
    assert config["mask_token_id"] == MASK
    assert config["transformer_layer_config"]["fc_norm"]  # where vLLM looks for it
    assert "peagle" not in config["transformer_layer_config"]


@pytest.mark.parametrize(
    ("layout", "mask_shape", "more"),
    [("vllm", [1, 96], set()), ("speculators", [1, 1, 96], {"t2d"})],
)
def test_tensors_have_vllms_names(
    layout: str,
    mask_shape: list[int],
    more: set[str],
    model: Path,
    target: TargetModel,
    tmp_path: Path,
) -> None:
    head = native(tmp_path / "head", target, None, draft_vocab_size=23)
    stored = load_file(head / "model.safetensors")
    written = load_file(export(head, model, tmp_path / "out", layout) / "model.safetensors")
    tables = {"embed_tokens.weight", "lm_head.weight"}
    assert written.keys() == (stored.keys() - {"mask_embedding"}) | tables | more
    assert list(written["mask_hidden"].shape) == mask_shape
    assert list(written["lm_head.weight"].shape) == [23, 32]
    if more:
        marked = torch.arange(23) + written["d2t"]
        assert sorted(marked.tolist()) == written["t2d"].nonzero().flatten().tolist()


def test_a_whole_vocabulary_needs_no_output_table(
    model: Path, target: TargetModel, tmp_path: Path
) -> None:
    head = native(tmp_path / "head", target, None, method="eagle3")
    out = export(head, model, tmp_path / "out", mask_token_id=None)
    written = load_file(out / "model.safetensors")
    assert "embed_tokens.weight" in written  # vLLM shares none between pipeline stages
    assert not {"lm_head.weight", "d2t", "mask_hidden"} & written.keys()
    assert "pard_token" not in config_of(out)


@pytest.mark.parametrize(("rope", "expected"), [("default", 128), ("yarn", 64)])
def test_vllm_is_told_to_draft_as_far_as_the_target_goes(
    rope: str, expected: int, model: Path, target: TargetModel, tmp_path: Path
) -> None:
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 1.0}
    sizes = {"max_position_embeddings": 64, "rope_parameters": parameters}
    head = native(tmp_path / "head", target, None, **sizes)
    config = config_of(export(head, model, tmp_path / "out"))
    assert config["max_position_embeddings"] == expected
    assert config["peagle"]["max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("changes", "layout", "named"),
    [
        (
            {"aux_hidden_state_layer_ids": (1, 2)},
            "vllm",
            "3 aux hidden states, this one reads [1, 2]",
        ),
        ({"aux_hidden_state_layer_ids": (1, 2, 2)}, "vllm", "in the order of the layers"),
        ({"aux_hidden_state_layer_ids": (2, 1, 3)}, "vllm", "in the order of the layers"),
        ({"norm_before_fc": True, "fc_norm": True}, "speculators", "norm_before_fc or fc_norm"),
    ],
)
def test_what_vllm_would_run_wrongly_is_refused(
    changes: Any, layout: str, named: str, model: Path, target: TargetModel, tmp_path: Path
) -> None:
    head = native(tmp_path / "head", target, None, **changes)
    with pytest.raises(HeadError) as caught:
        export(head, model, tmp_path / "out", layout)
    assert named in caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_narrow_head_without_tables_of_its_own_is_refused(
    model: Path, target: TargetModel, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "has_embed_tokens": True}
    head = native(tmp_path / "head", target, None, **sizes)
    with pytest.raises(HeadError, match="borrows the target's tables, 32 wide, but is 16 wide"):
        export(head, model, tmp_path / "out")


def test_a_head_for_another_model_is_refused(target: TargetModel, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    save_reference(tmp_path / "m", LlamaConfig(**UNEVEN.target | {"vocab_size": 61}))
    head = native(tmp_path / "head", target, None)
    with pytest.raises(HeadError, match="vocabulary 59 but the target has 61"):
        export(head, tmp_path / "m", tmp_path / "out")


def test_a_head_that_lacks_a_tensor_is_not_exported(
    model: Path, target: TargetModel, tmp_path: Path
) -> None:
    tensors = raw_tensors(target)
    del tensors["layers.1.mlp.up_proj.weight"]
    head = write(tmp_path / "head", raw_config(), tensors)
    with pytest.raises(HeadError, match=r"layers.1.mlp.up_proj.weight"):
        export(head, model, tmp_path / "out")


@pytest.mark.parametrize(("method", "mask"), [("p-eagle", 59), ("p-eagle", -1), ("eagle3", 3)])
def test_a_mask_id_that_makes_no_sense_is_refused(
    method: str, mask: int, model: Path, target: TargetModel, tmp_path: Path
) -> None:
    head = native(tmp_path / "head", target, None, method=method)
    with pytest.raises(HeadError, match="mask"):
        export(head, model, tmp_path / "out", mask_token_id=mask)


def test_only_a_head_is_replaced_and_only_when_asked(
    model: Path, target: TargetModel, tmp_path: Path
) -> None:
    head = native(tmp_path / "head", target, None)
    out = export(head, model, tmp_path / "out")
    with pytest.raises(HeadError, match="is not empty"):
        export(head, model, out)
    assert config_of(export(head, model, out, "speculators", force=True))["speculators_config"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter").write_text("keep me")
    with pytest.raises(HeadError, match="is not empty"):
        export(head, model, tmp_path / "home", force=True)
    with pytest.raises(HeadError, match="is a file"):
        export(head, model, tmp_path / "home/letter", force=True)
    assert (tmp_path / "home/letter").read_text() == "keep me"


def test_a_crash_while_exporting_leaves_nothing_behind(
    model: Path, target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = native(tmp_path / "head", target, None)
    write = Path.write_text

    def crash(path: Path, *arguments: Any, **options: Any) -> int:
        if path.name == "config.json":  # the last act
            raise ZeroDivisionError
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", crash)
    with pytest.raises(ZeroDivisionError):
        export(head, model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [head]


def tokenizer_folder(folder: Path, *special: str) -> tuple[Path, Any]:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = "<|user|>{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


def test_an_id_that_the_tokenizer_does_not_have_is_the_best_mask(tmp_path: Path) -> None:
    folder, tokenizer = tokenizer_folder(tmp_path, "<|reserved_1|>")
    size = len(tokenizer)
    assert choose_mask_token(folder, size + 3, set()) == size + 2


def test_a_reserved_token_comes_before_an_unseen_one_and_that_before_the_last(
    tmp_path: Path,
) -> None:
    special = ("<|user|>", "<gh_stars>", "<|reserved_1|>", "<empty>", "<repo>")
    folder, tokenizer = tokenizer_folder(tmp_path / "a", *special)
    size = len(tokenizer)
    numbers = dict(zip(special, tokenizer.convert_tokens_to_ids(list(special)), strict=True))
    assert choose_mask_token(folder, size, set()) == numbers["<|reserved_1|>"]
    folder, _ = tokenizer_folder(tmp_path / "b", "<|user|>", "<gh_stars>", "<empty>", "<repo>")
    repo = size - 2  # one token fewer than above
    assert choose_mask_token(folder, size - 1, set()) == repo
    assert choose_mask_token(folder, size - 1, {repo}) == repo - 1


def test_a_special_token_with_a_task_is_no_mask(tmp_path: Path) -> None:
    """The end of text, and what the chat template writes."""
    folder, tokenizer = tokenizer_folder(tmp_path, "<|user|>")
    with pytest.raises(HeadError, match="no unused id") as caught:
        choose_mask_token(folder, len(tokenizer), set())
    assert "--mask-token-id" in str(caught.value.hint)


def test_a_target_without_a_tokenizer_asks_for_the_mask_id(
    model: Path, target: TargetModel, tmp_path: Path
) -> None:
    head = native(tmp_path / "head", target, None)
    with pytest.raises(PeagleError, match="tokenizer"):
        export(head, model, tmp_path / "out", mask_token_id=None)


def test_force_never_replaces_a_model(model: Path, target: TargetModel, tmp_path: Path) -> None:
    head, mine = native(tmp_path / "head", target, None), tmp_path / "mine"
    shutil.copytree(model, mine)
    with pytest.raises(HeadError, match="is not empty"):
        export(head, model, mine, force=True)
    assert sorted(p.name for p in mine.iterdir()) == sorted(p.name for p in model.iterdir())
