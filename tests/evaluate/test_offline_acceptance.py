"""One teacher-forced pass finds what drafting step by step would find."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from peagle.data.dataset import Dataset
from peagle.evaluate.evaluator import Evaluator
from peagle.evaluate.replay import Limits, replay
from peagle.models.attention import causal_attention
from peagle.models.drafter import Packing
from peagle.models.eagle3 import Eagle3Drafter
from peagle.models.output import OutputRows
from peagle.models.p_eagle import PEagleDrafter
from peagle.models.target import TargetModel
from peagle.speculation.statistics import SpecDecodeStats
from peagle.teacher_forcing.draft_model import DraftModel, autocast
from peagle.teacher_forcing.features import OnlineFeatures
from tests.tiny import drafters, training
from tests.tiny.models import DEEP

K = 4
PROMPT = 3


def argmax(output: OutputRows, first: int, packing: Packing) -> Tensor:
    best = output.logits().argmax(-1)
    return (best if output.ids is None else output.ids[best])[None]


def drafted_replay(
    drafter: PEagleDrafter | Eagle3Drafter, model: TargetModel, tokens: Tensor, k: int
) -> SpecDecodeStats:
    """Drafts at each step for real and compares with the text that follows."""
    positions = torch.arange(len(tokens))
    aux_hidden_states = model(
        tokens, positions, causal_attention(positions), drafter.aux_hidden_state_layers
    ).aux_hidden_states
    assert aux_hidden_states is not None
    stats = SpecDecodeStats()
    newest = PROMPT
    while newest < len(tokens) - 1:
        draft = drafters.propose(drafter, tokens[: newest + 1], aux_hidden_states, k, argmax)
        truth = tokens[newest + 1 : newest + 1 + k].tolist()
        accepted = 0
        while accepted < len(truth) and draft[accepted] == truth[accepted]:
            accepted += 1
        stats.observe(k, accepted)
        newest += accepted + 1
    return stats


@pytest.mark.slow
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("draft_vocab_size", [training.VOCAB, 25])
def test_offline_acceptance_is_that_of_drafting_step_by_step(
    method: str, draft_vocab_size: int, tmp_path: Path
) -> None:
    model = DEEP.make_target()
    network = training.trainable_head(model, method, draft_vocab_size=draft_vocab_size)
    if draft_vocab_size < training.VOCAB:
        network.target_ids = torch.arange(draft_vocab_size) + 7
    drafter = PEagleDrafter(network) if method == "p-eagle" else Eagle3Drafter(network)
    documents = easy_documents(drafter, model)
    training.write_dataset(tmp_path, documents, PROMPT)
    evaluator = Evaluator(
        Dataset(tmp_path),
        list(range(len(documents))),
        OnlineFeatures(model, (2, 3, 5)),
        K,
        tokens_per_row=64,
        max_rows=90,
        chunk_rows=7,
        autocast=autocast(torch.device("cpu"), None),
    )
    result = evaluator(DraftModel(network))
    for k in range(1, K + 1):
        expected = SpecDecodeStats()
        for tokens in documents:
            expected.merge(drafted_replay(drafter, model, tokens, k))
        assert result.groups["all"][k - 1] == expected
    assert result.acceptance_length(K) > 1.3
    assert result.num_documents["category:a"] == 3


def easy_documents(drafter: PEagleDrafter | Eagle3Drafter, model: TargetModel) -> list[Tensor]:
    """Texts that follow the drafter itself now and then, so that some drafts are accepted."""
    generator = torch.Generator().manual_seed(3)
    documents = []
    for _ in range(6):
        tokens = torch.randint(7, 32, (PROMPT + 1,), generator=generator)
        while len(tokens) < 30:
            positions = torch.arange(len(tokens))
            aux_hidden_states = model(
                tokens, positions, causal_attention(positions), drafter.aux_hidden_state_layers
            ).aux_hidden_states
            assert aux_hidden_states is not None
            draft = drafters.propose(drafter, tokens, aux_hidden_states, K, argmax)
            kept = int(torch.randint(0, K + 1, (1,), generator=generator))
            own = torch.randint(7, 32, (1,), generator=generator)
            tokens = torch.cat((tokens, torch.tensor(draft[:kept]).long(), own))
        documents.append(tokens)
    return documents


def test_a_replay_of_two_answers_counts_each_from_its_prefill() -> None:
    #        prompt        answer of 3           prompt  answer of 2
    mask = [False, False, True, True, True, False, False, True, True]
    leading = [0, 2, 1, 0, 0, 0, 0, 0, 0]
    stats = replay(mask, leading, 3)
    # At token 2 both drafts are right, which ends answer 1; at token 7 none is.
    assert (stats.num_drafts, stats.num_accepted_tokens) == (2, 2)


def test_a_clipped_answer_is_not_drafted_past_its_limit() -> None:
    mask, leading = [False, True, True, True], [2, 1, 0, 0]
    stats = replay(mask, leading, 4, Limits(max_tokens=3))
    assert (stats.num_steps, stats.num_drafts, stats.num_draft_tokens) == (1, 1, 1)
    assert replay(mask, leading, 4).num_draft_tokens == 4
