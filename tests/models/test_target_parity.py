"""The native target equals transformers, on logits and on every hidden state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.checkpoints.targets import load_target
from peagle.models.attention import causal_attention
from peagle.models.drafter import Span
from peagle.models.target import TargetModel
from tests.tiny.caches import poisoned_cache, shuffled_tables
from tests.tiny.families import FAMILIES
from tests.tiny.models import UNEVEN, save_reference
from tests.tolerance import rounding

CPU = torch.device("cpu")


class Expected(NamedTuple):
    logits: Tensor  # [n, V]
    states: list[Tensor]  # [n, H] after 0 .. L-1 layers, then after all of them and the norm


def expected(model: Any, tokens: Tensor) -> Expected:
    with torch.no_grad():
        out = model(input_ids=tokens[None], output_hidden_states=True)
    return Expected(out.logits[0], [state[0] for state in out.hidden_states])


def check(target: TargetModel, hidden: Tensor, aux_hidden_states: Tensor, want: Expected) -> None:
    """`aux_hidden_states` holds every layer id 0..L."""
    size = target.config.hidden_size
    longest = max(size, target.config.intermediate_size)
    tol = rounding(terms=longest, depth=target.config.num_hidden_layers + 1)
    *before, after_all = aux_hidden_states.split(size, dim=-1)
    for layer, (own, state) in enumerate(zip(before, want.states[:-1], strict=True)):
        close(own, state, tol, f"layer {layer}")
    close(target.norm(after_all), want.states[-1], tol, "the last layer")
    close(hidden, want.states[-1], tol, "hidden")
    close(target.logits(hidden), want.logits, tol, "logits")


def close(actual: Tensor, wanted: Tensor, tol: float, what: str) -> None:
    """`tol` is relative to the size of the whole: the residual stream grows from layer to layer."""
    worst = float((actual - wanted).abs().max() / wanted.square().mean().sqrt())
    assert worst < tol, f"{what} differ by {worst:.1e} of their root mean square"


def all_layers(target: TargetModel) -> tuple[int, ...]:
    return tuple(range(target.config.num_hidden_layers + 1))


class Family(NamedTuple):
    folder: Path
    reference: Any
    target: TargetModel


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    reference = save_reference(folder, FAMILIES[request.param]())
    return Family(folder, reference, load_target(folder, dtype=torch.float32, device=CPU))


@torch.no_grad()
def test_one_pass_equals_transformers(family: Family) -> None:
    tokens, positions = UNEVEN.tokens(40), torch.arange(40)
    target = family.target
    hidden, aux_hidden_states = target(
        tokens, positions, causal_attention(positions), all_layers(target)
    )
    check(target, hidden, aux_hidden_states, expected(family.reference, tokens))


@torch.no_grad()
def test_chunks_of_several_sequences_through_the_paged_cache_equal_transformers(
    family: Family,
) -> None:
    target = family.target
    texts = [UNEVEN.tokens(n, seed=n) for n in (41, 40, 23, 6)]
    tables, num_slots = shuffled_tables([len(t) for t in texts])
    cache = poisoned_cache(target.cache_layout, num_slots, torch.float32)
    chunks = random.Random(0)
    done = [0] * len(texts)
    outputs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in texts]
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        spans = []
        for n, text in enumerate(texts):
            length = min(chunks.choice([0, 1, 5, 19, 25]), len(text) - done[n])
            if length:
                spans.append(Span(n, done[n], length))
        if not spans:
            continue
        rows = torch.cat([texts[s.sequence][s.start : s.start + s.length] for s in spans])
        attention = cache.attention(tables, spans)
        hidden, aux_hidden_states = target(rows, attention.positions, attention, all_layers(target))
        sizes = [s.length for s in spans]
        for span, h, t in zip(
            spans, hidden.split(sizes), aux_hidden_states.split(sizes), strict=True
        ):
            outputs[span.sequence].append((h, t))
            done[span.sequence] += span.length
    for text, parts in zip(texts, outputs, strict=True):
        hidden, aux_hidden_states = (torch.cat(part) for part in zip(*parts, strict=True))
        check(target, hidden, aux_hidden_states, expected(family.reference, text))


@pytest.mark.parametrize("name", ["llama-biases", "llama-tied", "qwen3-bias-window"])
def test_shards_load_like_one_file(name: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, FAMILIES[name](), max_shard_size="12KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    target = load_target(tmp_path, dtype=torch.float32, device=CPU)
    tokens, positions = UNEVEN.tokens(9), torch.arange(9)
    with torch.no_grad():
        hidden, aux_hidden_states = target(
            tokens, positions, causal_attention(positions), all_layers(target)
        )
        check(target, hidden, aux_hidden_states, expected(reference, tokens))


@pytest.mark.slow
@torch.no_grad()
def test_bfloat16_is_as_near_to_the_truth_as_transformers_is(family: Family) -> None:
    tokens, positions = UNEVEN.tokens(20), torch.arange(20)
    truth = expected(family.reference, tokens).logits
    half = AutoModelForCausalLM.from_pretrained(
        family.folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    theirs = (expected(half, tokens).logits.float() - truth).abs()
    target = load_target(family.folder, dtype=torch.bfloat16, device=CPU)
    assert {p.dtype for p in target.parameters()} == {torch.bfloat16}
    logits = target.logits(target(tokens, positions, causal_attention(positions)).hidden)
    assert logits.dtype == torch.float32
    ours = (logits - truth).abs()
    if target.config.experts is None:
        assert ours.mean() < 1.4 * theirs.mean()
        assert ours.max() < 2 * theirs.max()
    else:  # rounding sends a row to other experts here and there, and all that see it
        assert ours[:5].median() < 2 * theirs[:5].median()


@torch.no_grad()
def test_aux_hidden_states_come_in_the_order_asked_for_and_may_repeat() -> None:
    target = UNEVEN.make_target()
    tokens, positions = UNEVEN.tokens(5), torch.arange(5)
    attention = causal_attention(positions)
    every = target(tokens, positions, attention, (0, 1, 2, 3, 4)).aux_hidden_states
    some = target(tokens, positions, attention, (3, 0, 4, 3)).aux_hidden_states
    assert every is not None
    parts = every.split(32, dim=-1)
    assert torch.equal(some, torch.cat([parts[i] for i in (3, 0, 4, 3)], dim=-1))
    assert target(tokens, positions, attention).aux_hidden_states is None


@pytest.mark.network
@pytest.mark.slow
@torch.no_grad()
def test_smollm2_equals_transformers() -> None:
    folder = resolve_model("smollm2-135m")
    ids = load_tokenizer(folder)("The capital of France is Paris, and the capital of").input_ids
    tokens = torch.tensor(ids)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    want = expected(reference, tokens)
    del reference
    target = load_target(folder, dtype=torch.float32, device=CPU)
    positions = torch.arange(len(tokens))
    hidden, aux_hidden_states = target(
        tokens, positions, causal_attention(positions), all_layers(target)
    )
    check(target, hidden, aux_hidden_states, want)
    assert torch.equal(target.logits(hidden).argmax(-1), want.logits.argmax(-1))
