"""Scripts of `benchmarks/` whose figures are published: they measure what they say."""

from __future__ import annotations

import pytest

from tests.test_docs import script
from tests.tiny import engines
from tests.tiny.jobs import prompts
from tests.tiny.models import SHALLOW, head_drafter


@pytest.mark.slow
def test_gains_of_trees_compare_drafts_over_the_same_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temperatures = script("benchmarks/temperatures.py", monkeypatch)
    monkeypatch.setattr(temperatures, "RESAMPLES", 80)
    target = SHALLOW.make_target()
    drafter, texts = head_drafter(SHALLOW.make_head(target)), prompts(5)
    chains = engines.make_engine(target, drafter, k=3)
    trees = engines.make_engine(target, drafter, k=3, nodes=20)
    for temperature in (0.0, 1.0):
        chain = temperatures.answer(chains, texts, temperatures.Drafts(3), temperature, 12)
        tree = temperatures.answer(trees, texts, temperatures.Drafts(3, 20), temperature, 12)
        record = tree.record(chain)
        assert (record["K"], record["N"], record["different_answers"]) == (3, 20, 0)
        assert record["num_output_tokens"] == sum(map(len, tree.tokens)) == 5 * 12
        found = temperatures.gain(tree, chain)
        lengths = [run.record(chain)["mean_acceptance_length"] for run in (tree, chain)]
        assert found["gain"] == pytest.approx(lengths[0] / lengths[1], abs=1e-3)
        assert (found["tree"], found["chain"]) == ("N=20", "K=3")
        assert 1 <= found["low"] <= found["gain"] <= found["high"]
        assert found["gain"] > 1.05
