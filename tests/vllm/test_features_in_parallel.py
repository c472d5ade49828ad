"""A target split over two vLLM processes hands over the states of the whole target."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from peagle.checkpoints.targets import load_layerless, load_target
from peagle.data.packing import lay_out
from peagle.teacher_forcing.features import OnlineFeatures
from peagle.train.features.vllm_server import RequiredStates, open_features
from peagle.train.recipe import VllmSection
from tests.tiny.folders import byte_tokenizer
from tests.tiny.models import SHALLOW
from tests.tolerance import near

AUX_LAYERS = (2, 3, 3)
LENGTHS = (100, 37, 60)
CPU = torch.device("cpu")


def write_model(folder: Path) -> None:
    """Sizes that divide by two: heads, key-value heads, vocabulary."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = SHALLOW.llama_config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_tensor_parallel_states_are_those_of_the_whole_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # one NUMA node for both processes
    section = VllmSection(
        command=f"{sys.executable} -m vllm.entrypoints.openai.api_server --model",
        args=("--enforce-eager", "--tensor-parallel-size=2", "--max-num-batched-tokens=64"),
        requests=4,
    )
    whole = load_target(tmp_path / "model", dtype=torch.float32, device=CPU)
    layerless = load_layerless(tmp_path / "model", dtype=torch.float32, device=CPU)
    need = RequiredStates(
        str(tmp_path / "model"), whole.config, AUX_LAYERS, max(LENGTHS), torch.float32
    )
    source = open_features(section, need, layerless, tmp_path / "vllm.log")
    tokens = [torch.randint(512, (length,)) for length in LENGTHS]
    masks = [torch.ones(length) for length in LENGTHS]
    row = lay_out(tokens, masks, [0, 1, 2], sum(LENGTHS))
    ours, theirs = source(row, source.fetch(row)), OnlineFeatures(whole, AUX_LAYERS)(row)
    assert "Worker_TP1" in (tmp_path / "vllm.log").read_text()
    torch.testing.assert_close(
        ours.aux_hidden_states,
        theirs.aux_hidden_states,
        **near(theirs.aux_hidden_states, terms=256, depth=6),
    )
    torch.testing.assert_close(
        ours.states, theirs.states, **near(theirs.states, terms=256, depth=6)
    )
