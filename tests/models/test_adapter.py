"""A target of transformers' modules: its hidden states, and the way that a trial chooses for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Phi3Config, T5Config, T5ForConditionalGeneration

from peagle.checkpoints.targets import load_adapted
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.loading import load_engine_target, load_speculation
from peagle.errors import ConfigError, ModelError
from peagle.models.adapter import TransformersTarget
from peagle.models.attention import causal_attention
from peagle.models.drafter import Span
from tests.tiny.caches import poisoned_cache, shuffled_tables
from tests.tiny.families import ADAPTED, RECOMPUTED
from tests.tiny.models import UNEVEN, save_reference

from .test_target_parity import close, expected

CPU = torch.device("cpu")


def load(folder: Path) -> TransformersTarget:
    target = load_adapted(folder, dtype=torch.float32, device=CPU)
    assert isinstance(target, TransformersTarget)
    return target


@pytest.mark.parametrize("name", [*ADAPTED, *RECOMPUTED])
@torch.no_grad()
def test_chunks_of_several_sequences_equal_the_model_itself(name: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, (ADAPTED | RECOMPUTED)[name]())
    target = load(tmp_path)
    texts = [UNEVEN.tokens(n, seed=n) for n in (20, 9)]
    tables, num_slots = shuffled_tables([len(t) for t in texts])
    cache = poisoned_cache(target.cache_layout, num_slots, torch.float32)
    layers = tuple(range(5))
    outputs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    for spans in ([Span(0, 0, 13), Span(1, 0, 2)], [Span(1, 2, 7)], [Span(0, 13, 7)]):
        rows = torch.cat([texts[s.sequence][s.start : s.start + s.length] for s in spans])
        attention = cache.attention(tables, spans)
        hidden, states = target(rows, attention.positions, attention, layers)
        sizes = [s.length for s in spans]
        for span, *parts in zip(spans, hidden.split(sizes), states.split(sizes), strict=True):
            outputs[span.sequence].append(tuple(parts))
    for text, parts in zip(texts, outputs, strict=True):
        hidden, states = (torch.cat(part) for part in zip(*parts, strict=True))
        want = expected(reference, text)
        for layer, own in enumerate(states.split(32, dim=-1)[:4]):
            close(own, want.states[layer], 1e-4, f"layer {layer}")
        close(hidden, want.states[-1], 1e-4, "hidden")
        close(target.logits(hidden), want.logits, 1e-4, "logits")


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


def test_what_is_not_a_language_model_gets_one_line(tmp_path: Path) -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert "'t5' has no native implementation" in caught.value.message
    assert "\n" not in str(caught.value)
