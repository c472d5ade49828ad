"""A target of transformers' modules: its hidden states, and the way that a trial chooses for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Phi3Config, T5Config, T5ForConditionalGeneration

from peagle.checkpoints.targets import has_native_target, load_adapted
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.loading import load_engine_target, load_speculation
from peagle.errors import ConfigError, ModelError
from peagle.models.adapter import TransformersTarget, _from_digits, _to_digits
from peagle.models.attention import causal_attention
from peagle.models.drafter import Span
from tests.tiny.caches import poisoned_cache, shuffled_tables
from tests.tiny.families import ADAPTED, FAMILIES, RECOMPUTED, SEVERAL_STATES
from tests.tiny.models import UNEVEN, save_reference

from .test_target_parity import close, expected

CPU = torch.device("cpu")


def load(folder: Path) -> TransformersTarget:
    target = load_adapted(folder, dtype=torch.float32, device=CPU)
    assert isinstance(target, TransformersTarget)
    return target


EVERY = ADAPTED | RECOMPUTED | SEVERAL_STATES


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_chunks_of_several_sequences_equal_the_model_itself(name: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, EVERY[name]())
    target = load(tmp_path)
    assert target.has_hidden_states == (name not in SEVERAL_STATES)
    texts = [UNEVEN.tokens(n, seed=n) for n in (20, 9)]
    tables, num_slots = shuffled_tables([len(t) for t in texts])
    cache = poisoned_cache(target.cache_layout, num_slots, torch.float32)
    layers = tuple(range(5)) if target.has_hidden_states else ()
    outputs: list[list[torch.Tensor]] = [[], []]
    kept: list[list[torch.Tensor]] = [[], []]
    for spans in ([Span(0, 0, 13), Span(1, 0, 2)], [Span(1, 2, 7)], [Span(0, 13, 7)]):
        rows = torch.cat([texts[s.sequence][s.start : s.start + s.length] for s in spans])
        attention = cache.attention(tables, spans)
        hidden, states = target(rows, attention.positions, attention, layers)
        sizes = [s.length for s in spans]
        for collected, rows in ((outputs, hidden), (kept, states)):
            for span, own in zip(spans, () if rows is None else rows.split(sizes), strict=False):
                collected[span.sequence].append(own)
    assert target.rolls_back == (name in ADAPTED)
    for text, hidden, states in zip(texts, map(torch.cat, outputs), kept, strict=True):
        want = expected(reference, text)
        for layer in layers[:4]:
            own = torch.cat(states).split(32, dim=-1)[layer]
            close(own, want.states[layer], 1e-4, f"layer {layer}")
        if layers:
            close(hidden, want.states[-1], 1e-4, "hidden")
        close(target.logits(hidden), want.logits, 1e-4, "logits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_token_ids_keeps_every_id(dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 1, 255, 256, 65_535, 65_536, 262_143, 2**24 + 1])
    digits = _to_digits(ids).to(dtype)
    assert torch.equal(_from_digits(digits), ids)


def test_a_target_with_several_states_behind_a_layer_takes_no_head(tmp_path: Path) -> None:
    save_reference(tmp_path, SEVERAL_STATES["gemma3n"]())
    config = SpeculativeConfig(method="p-eagle", model="any")
    with pytest.raises(ConfigError, match="no head can read them"):
        load_speculation(config, load(tmp_path))


def test_a_target_that_computes_prefixes_again_says_so_and_takes_chains_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_reference(tmp_path, RECOMPUTED["lfm2"]())
    target = load_engine_target(tmp_path, EngineConfig(device="cpu", dtype="float32"))
    assert not target.rolls_back
    assert "slower" in caplog.text
    assert "again at every step" in caplog.text
    positions = torch.arange(3)
    with pytest.raises(ModelError, match="cannot be evaluated"):
        target(positions, positions, causal_attention(positions))
    config = SpeculativeConfig(method="ngram", num_draft_nodes=4)
    with pytest.raises(ConfigError, match="prefix"):
        load_speculation(config, target)


def test_a_rope_that_changes_with_the_length_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = UNEVEN.target | {"pad_token_id": None, "original_max_position_embeddings": 48}
    save_reference(tmp_path, Phi3Config(**sizes, rope_parameters=rope | factors))
    with pytest.raises(ModelError, match="longrope"):
        load(tmp_path)


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    """A draft would change what the target says before it."""
    save_reference(tmp_path, FAMILIES["gemma3"](use_bidirectional_attention=True))
    assert not has_native_target(tmp_path)
    with pytest.raises(ModelError, match="depend on the tokens behind it"):
        load(tmp_path)


def test_what_is_not_a_language_model_gets_one_line(tmp_path: Path) -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert "'t5' has no native implementation" in caught.value.message
    assert "\n" not in str(caught.value)
