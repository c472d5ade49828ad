"""Turns a Llama GGUF file into a model folder that transformers, vLLM and we read alike.

We do not use transformers' own GGUF loader: it needs accelerate, it marks the model as quantized
so that it cannot be saved, and it loses the digit splitting of SmolLM's tokenizer, so that some
texts (" ½", " ٣") get other ids than the target was trained with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # llama.cpp's token type of special tokens


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes config, tokenizer, chat template and float32 `model.safetensors` into `folder`."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ModelError(f"{source}: GGUF files of architecture {architecture!r} are not supported")
    config = _config(reader)
    _write_json(folder / "config.json", config)
    special_ids = {k: v for k, v in config.items() if k.endswith("_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **special_ids})
    _write_tokenizer(reader, folder)
    _write_weights(reader, config, folder)


def _config(reader: GGUFReader) -> dict[str, Any]:
    """A Llama `config.json`; `rope_theta` stands twice, for transformers before 5 and since."""
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    theta = _field(reader, "llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        # Stored as float32, where 1e-05 reads back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
        "torch_dtype": "float32",
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
    }


def _write_weights(reader: GGUFReader, config: dict[str, Any], folder: Path) -> None:
    """Writes each tensor once; a tied output matrix is not in the file, so neither is it here."""
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            values = _unpermute(values, heads if ".attn_q." in tensor.name else kv_heads)
        weights[_tensor_name(tensor.name)] = values
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _unpermute(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """llama.cpp rotates neighbouring pairs and stores q and k for that; we rotate halves."""
    import numpy as np

    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _tensor_name(name: str) -> str:
    """The Hugging Face name; a tensor we do not know would be silently missing, so it raises."""
    parts = name.split(".")  # blk.7.attn_q.weight
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.weight"
    if name not in _TOP:
        raise ModelError(f"the GGUF file holds a tensor we do not know: {name}")
    return _TOP[name]


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    _build_tokenizer(reader, tokens).save(str(folder / "tokenizer.json"))
    options = {
        # Not GPT2Tokenizer: transformers 5 would rebuild that one without the digit splitting.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        "clean_up_tokenization_spaces": False,
        "model_max_length": _field(reader, "llama.context_length"),
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
    _write_json(folder / "tokenizer_config.json", options)


def _build_tokenizer(reader: GGUFReader, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE whose digits stand alone, as SmolLM2 was trained with."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    split = _field(reader, "tokenizer.ggml.pre")
    if split != "smollm":
        raise ModelError(f"GGUF files with the pre-tokenizer {split!r} are not supported")
    merges = [tuple(m.split(" ")) for m in _field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def _field(reader: GGUFReader, key: str) -> Any:
    if key not in reader.fields:
        raise ModelError(f"the GGUF file lacks {key}")
    return reader.fields[key].contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
