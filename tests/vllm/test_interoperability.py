"""SmolLM2-135M on vLLM and on the embedded engine: the same tokens, the same acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from peagle import LLM
from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.exporting import export_head
from peagle.checkpoints.heads.references import resolve_head
from peagle.checkpoints.references import resolve_model
from tests.vllm.interop import (
    GREEDY,
    MODEL,
    QUESTIONS,
    Outcome,
    assert_same_tokens,
    embedded,
    run_embedded,
    run_vllm,
)

pytestmark = [pytest.mark.vllm, pytest.mark.network, pytest.mark.slow]

P_EAGLE, EAGLE3 = "smollm2-135m-p-eagle", "smollm2-135m-eagle3"


class Case(NamedTuple):
    head: str
    k: int
    layout: str  # "native": the backend exports it by itself

    def __str__(self) -> str:
        return f"{self.head}-{self.k}-{self.layout}"


CASES = (
    Case(P_EAGLE, 3, "vllm"),
    Case(P_EAGLE, 5, "speculators"),
    Case(P_EAGLE, 7, "native"),
    Case(EAGLE3, 3, "vllm"),
    Case(EAGLE3, 3, "speculators"),
)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return embedded(MODEL)


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[Any]:
    return [plain.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture(scope="module")
def theirs(case: Case, prompts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    head = case.head
    if case.layout != "native":
        folder: Path = tmp_path_factory.mktemp("heads") / str(case)
        export_head(case.head, MODEL, folder, case.layout)  # type: ignore[arg-type]
        head = str(folder)
    return run_vllm(MODEL, prompts, head, case.k)


@pytest.fixture(scope="module")
def ours(case: Case, prompts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """As it is exported: without a correction, which vLLM does not have."""
    folder: Path = tmp_path_factory.mktemp("ours") / str(case)
    export_head(case.head, MODEL, folder, "vllm")
    return run_embedded(MODEL, prompts, str(folder), case.k)


def test_the_plain_target_says_the_same(plain: LLM, prompts: list[Any]) -> None:
    ours = Outcome(plain.generate(prompts, GREEDY), plain.stats)
    assert_same_tokens(plain, ours, run_vllm(MODEL, prompts, None, 0))


def test_a_head_gives_the_same_tokens(plain: LLM, ours: Outcome, theirs: Outcome) -> None:
    assert all(len(answer) == 64 for answer in theirs.answers)
    assert_same_tokens(plain, ours, theirs)


def test_mean_acceptance_length_is_within_two_percent(ours: Outcome, theirs: Outcome) -> None:
    expected = ours.stats.mean_acceptance_length
    assert expected > 1.5
    assert theirs.stats.mean_acceptance_length == pytest.approx(expected, rel=0.02)


def test_per_position_acceptance_is_within_two_points(
    case: Case, ours: Outcome, theirs: Outcome
) -> None:
    expected = ours.stats.per_position_acceptance
    assert len(expected) == case.k
    assert theirs.stats.per_position_acceptance == pytest.approx(expected, abs=0.02)


def test_vllm_counts_more_only_in_the_last_step_of_an_answer(case: Case, theirs: Outcome) -> None:
    # Its totals hold what the per-request figures leave out: drafts past the 64th token.
    counters, stats = theirs.counters, theirs.stats
    assert counters is not None
    steps = counters.num_drafts - stats.num_drafts
    accepted = counters.num_accepted_tokens - stats.num_accepted_tokens
    assert 0 <= steps <= len(QUESTIONS)
    assert 0 <= accepted <= len(QUESTIONS) * case.k
    assert counters.num_draft_tokens == case.k * counters.num_drafts


def test_vllm_finds_target_and_method_in_the_speculators_layout_alone(tmp_path: Path) -> None:
    from vllm import EngineArgs

    export_head(P_EAGLE, MODEL, tmp_path / "head", "speculators")
    arguments = EngineArgs(model=str(tmp_path / "head"), dtype="float32", max_model_len=512)
    config = arguments.create_engine_config()
    drafting = config.speculative_config
    assert config.model_config.model == str(resolve_model(MODEL))
    assert (drafting.method, drafting.parallel_drafting) == ("eagle3", True)
    advised = read_head_config(resolve_head(P_EAGLE)).num_speculative_tokens
    assert drafting.num_speculative_tokens == advised
