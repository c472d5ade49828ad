"""What the drafters propose, against training's rows and against a second implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle.checkpoints.heads.loading import save_head
from peagle.models.attention import MaskedAttention
from peagle.models.drafter import CacheLayout, NetworkDrafter
from peagle.models.eagle import EagleNetwork
from peagle.models.eagle3 import Eagle3Drafter
from peagle.models.masks import Elements, dense_mask
from peagle.models.p_eagle import PEagleDrafter
from peagle.models.rollouts import full_rollouts, rollout_hidden, rollout_rows
from peagle.models.target import TargetModel
from tests.models import serving
from tests.models.naive import NaiveHead
from tests.tiny.models import UNEVEN
from tests.tolerance import near

K = 5
OWN_TABLES = {"has_embed_tokens": True, "has_lm_head": True}
REDUCED = {"draft_vocab_size": 23}
NARROW = {"hidden_size": 20, **OWN_TABLES}  # narrower than its target

P_EAGLE_HEADS: dict[str, dict[str, Any]] = {
    "1-layer": {"num_hidden_layers": 1},
    "2-layers": {},
    "4-layers": {"num_hidden_layers": 4},
    "norm-before-residual": {"norm_before_residual": True},
    "reduced-vocabulary": REDUCED,
    "reduced-own-tables": {**REDUCED, **OWN_TABLES},
    "own-tables": OWN_TABLES,
    "narrow": NARROW,
    "windowed": {"sliding_window": 8},
}
EAGLE3_HEADS: dict[str, dict[str, Any]] = {
    "1-layer": {},
    "2-layers": {"num_hidden_layers": 2},
    "norm-before-residual": {"norm_before_residual": True},
    "norm-output": {"norm_output": True},
    "reduced-vocabulary": REDUCED,
    "reduced-own-tables": {**REDUCED, **OWN_TABLES, "norm_output": True},
    "narrow": NARROW,
    "windowed": {"num_hidden_layers": 2, "sliding_window": 8},
}
FORMS = pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
METHODS = pytest.mark.parametrize("method", ["p-eagle", "eagle3"])


def drafter_of(network: EagleNetwork) -> NetworkDrafter:
    is_parallel = network.config.method == "p-eagle"
    return PEagleDrafter(network) if is_parallel else Eagle3Drafter(network)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return UNEVEN.make_target()


def naive(network: EagleNetwork, target: TargetModel, folder: Path) -> NaiveHead:
    save_head(network, folder)
    return NaiveHead(
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
        target.embed_tokens.weight,
        target.lm_head.weight,
    )


def training_logits(network: EagleNetwork, text: serving.Text, shuffle: bool) -> dict[Any, Tensor]:
    """(anchor, depth) -> logits, from one forward pass over all rollouts of a text."""
    elements = full_rollouts(len(text.tokens) - 1, K)
    if shuffle:  # a flat sequence has no order of its own
        order = torch.randperm(len(elements.anchor), generator=torch.Generator().manual_seed(3))
        elements = Elements(*(field[order] for field in elements))
    attention = MaskedAttention(dense_mask(elements), elements.positions)
    hidden = rollout_hidden(
        network, elements, text.tokens[1:], text.aux_hidden_states[:-1], attention
    )
    keys = zip(elements.anchor.tolist(), elements.depth.tolist(), strict=True)
    return dict(zip(keys, network.logits(hidden), strict=True))


@FORMS
@pytest.mark.parametrize("name", P_EAGLE_HEADS)
def test_training_logits_at_anchor_and_depth_are_those_of_the_proposed_token(
    name: str, padded: bool, target: TargetModel
) -> None:
    network = UNEVEN.make_head(target, **P_EAGLE_HEADS[name])
    texts = serving.make_texts([40, 31, 12], network.fc.in_features)
    served = serving.serve(PEagleDrafter(network), texts, K, padded=padded)
    assert {len(s.drafted) for s in served} == {1, 2, 3, 4, 5}
    trained = [training_logits(network, t, shuffle=n > 0) for n, t in enumerate(texts)]
    for text, known, logits, _ in served:
        newest_verified = known - 2
        for depth, row in enumerate(logits):
            torch.testing.assert_close(row, trained[text][newest_verified, depth])


@pytest.mark.slow
@pytest.mark.parametrize("name", P_EAGLE_HEADS)
def test_p_eagle_equals_the_naive_drafter(name: str, target: TargetModel, tmp_path: Path) -> None:
    network = UNEVEN.make_head(target, **P_EAGLE_HEADS[name])
    second = naive(network, target, tmp_path / "head")
    texts = serving.make_texts([12, 9], network.fc.in_features)
    served = serving.serve(PEagleDrafter(network), texts, 4)
    assert len(served) >= 4
    for text, known, logits, drafted in served[-4:]:
        tokens, aux_hidden_states = texts[text]
        wanted = second.p_eagle_logits(tokens[:known], aux_hidden_states, len(logits))
        # All is float64 but the angles: nothing is summed in float32.
        torch.testing.assert_close(logits, wanted, **near(wanted, terms=1))
        assert drafted == second.target_ids[wanted.argmax(-1)].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGLE3_HEADS)
def test_eagle3_equals_the_naive_drafter(name: str, target: TargetModel, tmp_path: Path) -> None:
    network = UNEVEN.make_head(target, "eagle3", **EAGLE3_HEADS[name])
    second = naive(network, target, tmp_path / "head")
    texts = serving.make_texts([12, 10, 7], network.fc.in_features)
    served = serving.serve(Eagle3Drafter(network), texts, 4)
    assert len(served) >= 5
    for text, known, logits, drafted in served[-5:]:
        tokens, aux_hidden_states = texts[text]
        wanted = second.eagle3_logits(tokens[:known], aux_hidden_states, len(logits))
        # The angles of a draft reach the next draft's features, four times at most.
        torch.testing.assert_close(logits, wanted, **near(wanted, terms=1, depth=4))
        assert drafted == second.target_ids[wanted.argmax(-1)].tolist()


@METHODS
def test_proposals_do_not_depend_on_the_steps_before(method: str, target: TargetModel) -> None:
    network = UNEVEN.make_head(target, method, **REDUCED)
    texts = serving.make_texts([40, 37, 20], network.fc.in_features)
    seen: dict[Any, Tensor] = {}
    for seed in range(3):
        for text, known, logits, _ in serving.serve(drafter_of(network), texts, K, seed):
            for depth, row in enumerate(logits):
                earlier = seen.setdefault((text, known, depth), row)
                torch.testing.assert_close(row, earlier)


@METHODS
@pytest.mark.parametrize("seed", range(3))
def test_padded_rows_give_the_drafts_of_exact_ones(
    method: str, seed: int, target: TargetModel
) -> None:
    network = UNEVEN.make_head(target, method, **REDUCED)
    texts = serving.make_texts([25, 19, 12, 5], network.fc.in_features)
    exact = serving.serve(drafter_of(network), texts, K, seed)
    padded = serving.serve(drafter_of(network), texts, K, seed, padded=True)
    for ours, theirs in zip(padded, exact, strict=True):
        assert ours[:2] == theirs[:2]
        torch.testing.assert_close(ours.logits, theirs.logits)
        assert ours.drafted == theirs.drafted


@FORMS
@METHODS
def test_prompts_alone_fill_the_cache(method: str, padded: bool, target: TargetModel) -> None:
    """A step without newest tokens drafts nothing, and later ones read what it wrote."""
    network = UNEVEN.make_head(target, method)
    texts = serving.make_texts([9, 6], network.fc.in_features)
    server = serving.Server(drafter_of(network), texts, K, 0, padded=padded)
    assert server.propose([], [serving.Chunk(1, 0, 3), serving.Chunk(0, 0, 6)]) == []
    (alone,) = server.propose([serving.Decode(0, 6, 1, K)], [])
    again = serving.Server(drafter_of(network), texts, K, 0, padded=padded)
    (beside,) = again.propose([serving.Decode(0, 6, 1, K)], [serving.Chunk(0, 0, 6)])
    torch.testing.assert_close(alone.logits, beside.logits)
    assert not alone.logits.isnan().any()


def test_rollout_rows_are_the_rows_of_the_general_rollout(target: TargetModel) -> None:
    network = UNEVEN.make_head(target)
    text = serving.make_texts([7], network.fc.in_features)[0]
    elements = full_rollouts(6, 3)
    attention = MaskedAttention(dense_mask(elements), elements.positions)
    rows = rollout_rows(network, text.tokens[1:], text.aux_hidden_states[:-1], 12)
    hidden = network(*rows, elements.positions, attention)
    general = rollout_hidden(
        network, elements, text.tokens[1:], text.aux_hidden_states[:-1], attention
    )
    torch.testing.assert_close(hidden, general)


def test_drafters_say_what_the_engine_must_provide(target: TargetModel) -> None:
    p_eagle = PEagleDrafter(
        UNEVEN.make_head(target, num_hidden_layers=3, max_position_embeddings=77)
    )
    eagle3 = Eagle3Drafter(UNEVEN.make_head(target, "eagle3"))
    assert p_eagle.aux_hidden_state_layers == eagle3.aux_hidden_state_layers == (1, 2, 4)
    assert p_eagle.cache_layout == CacheLayout(3, 2, 6)
    assert eagle3.cache_layout == CacheLayout(1, 2, 6)
    assert (p_eagle.max_positions, p_eagle.max_speculative_tokens) == (77, 8)
    assert (p_eagle.method, eagle3.method) == ("p-eagle", "eagle3")
