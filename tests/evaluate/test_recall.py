"""Recall counts where the right token stands, and the oracle chooses it wherever it can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peagle.evaluate.evaluator import Document, Drafted, greedy_acceptance, ranked_acceptance
from peagle.evaluate.recall import Recall, _recall, evaluate_greedy, is_recalled
from peagle.evaluate.replay import Limits
from peagle.sampling_params import SamplingParams
from peagle.teacher_forcing.draft_model import DraftModel

from .test_engine_agreement import evaluator, random_head, run_engine, write_answers

VOCAB = 40


def drafted(logits: torch.Tensor, labels: list[int], corrected: torch.Tensor | None) -> Drafted:
    """Whose output table is the identity, so that states are logits; draft ids are shifted."""
    nothing = torch.zeros(0)
    ids = torch.arange(VOCAB) + 100
    return Drafted(logits, torch.eye(VOCAB), ids, nothing, nothing, torch.tensor(labels), corrected)


def test_a_place_is_that_of_the_targets_token_among_the_best_of_the_pass() -> None:
    logits = -torch.arange(float(VOCAB)).expand(5, VOCAB)  # token 100 is the best, then 101 ...
    found = ranked_acceptance(drafted(logits, [100, 103, 115, 116, 7], None))
    assert found[0].tolist() == [1, 0, 0, 0, 0]
    assert found[1].tolist() == pytest.approx([1, 1 / 4, 1 / 16, 0, 0])
    for best, expected in ((1, 1), (3, 1), (4, 2), (15, 2), (16, 3)):
        assert int(is_recalled(found[1], best).sum()) == expected


def test_a_correction_changes_what_is_accepted_and_no_place() -> None:
    logits = -torch.arange(float(VOCAB)).expand(2, VOCAB)
    corrected = logits.clone()
    corrected[:, 5] = 9.0
    given = drafted(logits, [105, 100], corrected)
    assert ranked_acceptance(given)[0].tolist() == greedy_acceptance(given)[0].tolist() == [1, 0]
    assert ranked_acceptance(given)[1].tolist() == pytest.approx([1 / 6, 1])


def test_every_token_of_an_answer_at_which_a_step_may_begin_counts_once() -> None:
    #        prompt  answer: the first token is prefill's, so steps begin at the first three
    mask = [False, True, True, True, True, False]
    places = torch.zeros(6, 3)
    places[0] = torch.tensor([1.0, 1 / 5, 1 / 16])  # anchors; 3, 2 and 1 tokens are to come
    places[1] = torch.tensor([1 / 4, 1.0, 1.0])
    places[3] = 1.0  # no token of the answer comes behind
    recall = _recall(Document(["all"], mask, Limits(), torch.stack((places, places))), 3)
    assert recall.num_tokens == [3, 2, 1]
    assert recall.found == {1: [1, 1, 0], 4: [2, 1, 0], 8: [2, 2, 0], 16: [2, 2, 1]}
    total = Recall()
    total.merge(recall)
    total.merge(recall)
    assert total.shares()[4] == pytest.approx([2 / 3, 1 / 2, 0])


def test_the_oracle_is_ahead_of_the_chain_by_what_is_recalled(tmp_path: Path) -> None:
    network = random_head("p-eagle")
    requests, _ = run_engine(network, 1, SamplingParams(temperature=0.0, max_tokens=21))
    found = evaluate_greedy(evaluator(write_answers(tmp_path, requests, 21)), DraftModel(network))
    shares = list(found.recall["all"].shares().values())
    assert all(few < many for few, many in zip(shares[0], shares[-1], strict=True))
    assert shares == sorted(shares)
    chain, oracle = found.acceptance, found.oracle
    assert all(oracle.acceptance_length(k) > chain.acceptance_length(k) for k in (1, 2, 3, 4))
