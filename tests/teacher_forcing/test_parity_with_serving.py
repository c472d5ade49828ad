"""Training computes what the drafter computes when it serves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peagle.models.attention import causal_attention
from peagle.models.drafter import Packing
from peagle.models.eagle import EagleNetwork
from peagle.models.eagle3 import Eagle3Drafter
from peagle.models.output import OutputRows
from peagle.models.p_eagle import PEagleDrafter
from peagle.models.rollouts import rollout_hidden
from peagle.teacher_forcing import draft_model
from peagle.teacher_forcing.attention import FlexAttention, attention_for
from peagle.teacher_forcing.draft_model import segment_hidden, unroll
from peagle.teacher_forcing.features import Features, OnlineFeatures
from peagle.teacher_forcing.partition import build_segments, supervised_runs
from tests.tiny import drafters, training
from tests.tiny.models import DEEP
from tests.tolerance import near

K = 4
WINDOWS = pytest.mark.parametrize("window", [None, 8])


class TrueTokens:
    """Chooses the true continuation and keeps the logits it was shown."""

    def __init__(self, tokens: Tensor, anchor: int) -> None:
        self.tokens, self.anchor = tokens, anchor
        self.logits: dict[int, Tensor] = {}

    def __call__(self, output: OutputRows, first: int, packing: Packing) -> Tensor:
        depths = range(first, first + packing.rows_per_item)
        self.logits.update(zip(depths, output.logits(), strict=True))
        return self.tokens[None, [depth + self.anchor + 2 for depth in depths]]


def served_logits(
    drafter: PEagleDrafter | Eagle3Drafter,
    tokens: Tensor,
    aux_hidden_states: Tensor,
    anchor: int,
    k: int = K,
) -> Tensor:
    """[K, V]: what the drafter says when it starts after the token at anchor + 1."""
    chooser = TrueTokens(tokens, anchor)
    drafters.propose(drafter, tokens[: anchor + 2], aux_hidden_states, k, chooser)
    return torch.stack([chooser.logits[d] for d in range(k)])


def document(row_tokens: Tensor, model: object, start: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = row_tokens[start : start + length]
    positions = torch.arange(length)
    aux_hidden_states = model(
        tokens, positions, causal_attention(positions), (2, 3, 5)
    ).aux_hidden_states  # type: ignore[operator]
    return tokens, aux_hidden_states


@WINDOWS
def test_training_logits_at_anchor_and_depth_are_those_of_the_served_draft_token(
    window: int | None,
) -> None:
    model = DEEP.make_target()
    network = training.trainable_head(model, sliding_window=window)
    row = training.packed([14, 17], capacity=33)
    counts = supervised_runs(row).clamp(max=K)
    (segment,) = build_segments(row, counts, [0, 33], torch.ones(K))
    hidden = segment_hidden(network, segment, OnlineFeatures(model, (2, 3, 5))(row))
    logits = network.logits(hidden)
    tokens, aux_hidden_states = document(row.token_ids, model, 14, 17)
    for anchor in (2, 7, 17 - K - 2):
        served = served_logits(PEagleDrafter(network), tokens, aux_hidden_states, anchor)
        for depth in range(K):
            at = (segment.elements.anchor == 14 + anchor) & (segment.elements.depth == depth)
            torch.testing.assert_close(logits[at][0], served[depth])


@WINDOWS
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_test_time_training_logits_are_those_of_the_served_draft_token(
    norm_output: bool, layers: int, window: int | None
) -> None:
    model = DEEP.make_target()
    changes = {"norm_output": norm_output, "num_hidden_layers": layers, "sliding_window": window}
    network = training.trainable_head(model, "eagle3", **changes)
    row = training.packed([14, 17], capacity=33)
    features = OnlineFeatures(model, (2, 3, 5))(row)
    steps = unroll(network, features, row.document, row.position, K)
    tokens, aux_hidden_states = document(row.token_ids, model, 14, 17)
    for anchor in (0, 7, 17 - K - 2):
        served = served_logits(Eagle3Drafter(network), tokens, aux_hidden_states, anchor)
        for depth in range(K):
            trained = network.logits(steps[depth][14 + anchor])
            torch.testing.assert_close(trained, served[depth])


def test_a_chain_may_be_longer_than_its_window() -> None:
    model, k = DEEP.make_target(), 11
    network = training.trainable_head(model, "eagle3", num_hidden_layers=2, sliding_window=8)
    row = training.packed([20], capacity=20)
    features = OnlineFeatures(model, (2, 3, 5))(row)
    steps = unroll(network, features, row.document, row.position, k)
    tokens, aux_hidden_states = document(row.token_ids, model, 0, 20)
    served = served_logits(Eagle3Drafter(network), tokens, aux_hidden_states, 6, k)
    for depth in range(k):
        torch.testing.assert_close(network.logits(steps[depth][6]), served[depth])


@WINDOWS
def test_flex_attention_trains_what_is_served(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's attention; compiled it is the same."""
    model, row = DEEP.make_target(torch.float32), training.packed([14, 17], capacity=33)
    (segment,) = build_segments(row, supervised_runs(row).clamp(max=K), [0, 33], torch.ones(K))
    features = OnlineFeatures(model, (2, 3, 5))(row)
    sizes = {"sliding_window": window, "head_dim": 16}  # as wide as it takes
    for method in ("p-eagle", "eagle3"):
        network = training.trainable_head(model, method, **sizes).requires_grad_(False)

        def states(network: EagleNetwork = network, method: str = method) -> Tensor:
            if method == "p-eagle":
                return segment_hidden(network, segment, features)
            return torch.cat(unroll(network, features, row.document, row.position, K))

        expected = states()
        with monkeypatch.context() as patch:
            patch.setattr(draft_model, "attention_for", FlexAttention)
            patch.setattr(draft_model, "context_for", FlexAttention)
            torch.testing.assert_close(states(), expected, **near(expected, terms=64, depth=4))


def test_rows_laid_out_for_training_equal_the_general_rollout() -> None:
    model = DEEP.make_target()
    network = training.trainable_head(model)
    row = training.packed([20], capacity=20)
    (segment,) = build_segments(row, supervised_runs(row).clamp(max=K), [0, 20], torch.ones(K))
    features: Features = OnlineFeatures(model, (2, 3, 5))(row)
    expected = rollout_hidden(
        network,
        segment.elements,
        features.next_tokens,
        features.aux_hidden_states,
        attention_for(segment.elements, segment.positions),
    )
    torch.testing.assert_close(segment_hidden(network, segment, features), expected)


def test_packed_documents_do_not_see_each_other() -> None:
    model = DEEP.make_target()
    row = training.packed([9, 12], capacity=24)
    features = OnlineFeatures(model, (2, 3, 5))(row)
    for start, length in ((0, 9), (9, 12)):
        _, aux_hidden_states = document(row.token_ids, model, start, length)
        torch.testing.assert_close(
            features.aux_hidden_states[start : start + length], aux_hidden_states
        )
