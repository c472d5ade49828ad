"""A converted GGUF file is the model that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from peagle.checkpoints.gguf import _IN_LAYER, _TOP, convert_gguf
from peagle.checkpoints.references import load_tokenizer
from peagle.errors import ModelError
from tests.tolerance import near

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
HEADS, KV_HEADS = 4, 2


def _tokens() -> list[str]:
    """Three special tokens, the 256 bytes in GPT-2's alphabet, and what the merges make."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]


def _target(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(_tokens()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _gguf_name(name: str) -> str:
    for ours, theirs in _TOP.items():
        if name == theirs:
            return ours
    _, _, layer, part = name.split(".", 3)
    return next(
        f"blk.{layer}.{ours}.weight"
        for ours, theirs in _IN_LAYER.items()
        if part == f"{theirs}.weight"
    )


def _write_gguf(path: Path, model: LlamaForCausalLM, **changed: Any) -> None:
    writer = gguf.GGUFWriter(path, changed.get("architecture", "llama"))
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed.get("pre", "smollm"))
    writer.add_token_list(_tokens())
    writer.add_token_types([3] * 3 + [1] * (len(_tokens()) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if changed.get("template", True):
        writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = _permute(weight, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(_gguf_name(name), weight)
    if "extra" in changed:
        writer.add_tensor(changed["extra"], np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _converted(tmp_path: Path, model: LlamaForCausalLM, **changed: Any) -> Path:
    _write_gguf(tmp_path / "model.gguf", model, **changed)
    (tmp_path / "folder").mkdir()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    return tmp_path / "folder"


@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_model_gives_the_same_logits(tmp_path: Path, tied: bool) -> None:
    model = _target(tied)
    folder = _converted(tmp_path, model)
    again, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert again.config.tie_word_embeddings is tied
    assert again.config.rms_norm_eps == 1e-5
    assert again.generation_config.eos_token_id == 2
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours, theirs = again(ids).logits, model(ids).logits
    torch.testing.assert_close(ours, theirs, **near(theirs, terms=64, depth=3))


def test_the_tokenizer_merges_splits_digits_and_keeps_special_tokens_whole(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_converted(tmp_path, _target(True)))
    assert tokenizer.tokenize("hello12") == ["hello", "1", "2"]  # though a merge makes "12"
    assert tokenizer("<|im_start|>h<|im_end|>").input_ids == [1, _tokens().index("h"), 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    text = " 漢 ½\n\tx"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nhi"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architecture": "qwen2"}, "qwen2"),
        ({"pre": "gpt-2"}, "gpt-2"),
        ({"extra": "blk.0.attn_q_norm.weight"}, "attn_q_norm"),
        ({"extra": "rope_freqs.weight"}, "rope_freqs"),
        ({"template": False}, "chat_template"),
    ],
)
def test_a_file_we_cannot_convert_whole_is_refused(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        _converted(tmp_path, _target(True), **changed)
