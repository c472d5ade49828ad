"""Heads for mixtures and for Gemma, in the released layouts: loaded, run, trained and exported."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from peagle.checkpoints.heads.exporting import export_head
from peagle.checkpoints.references import load_config
from peagle.checkpoints.targets import load_layerless
from peagle.engine.request import Request
from peagle.kernels.reference.experts import MXFP4
from peagle.models import experts as experts_module
from peagle.models.attention import causal_attention
from peagle.models.config import DecoderConfig, head_rope
from peagle.models.eagle import EagleNetwork
from peagle.models.experts import LowBitMatrices
from peagle.models.target import TargetModel
from peagle.train.loop import TrainingRun
from peagle.train.setup import assemble, compile_layers
from tests.checkpoints.foreign_heads import MASK, load, raw_config, raw_tensors, target_of, write
from tests.tiny import engines, training
from tests.tiny.families import FAMILIES
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import UNEVEN, head_drafter, save_reference

JOBS = [Job(prompt, GREEDY) for prompt in prompts(3, seed=8)]


def run(target: TargetModel, network: EagleNetwork | None) -> list[Request]:
    drafter = None if network is None else head_drafter(network)
    return engines.run(engines.make_engine(target, drafter, 3), JOBS)


def drafts(requests: list[Request]) -> list[list[int]]:
    """What was asked for and accepted: equal for equal heads."""
    return [[r.stats.num_draft_tokens, r.stats.num_accepted_tokens] for r in requests]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "gemma4-moe"])
def test_a_released_head_runs_and_one_is_trained_and_exported(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_reference(model, FAMILIES[name]())
    target = target_of(model, torch.float32)
    plain = engines.answers_of(run(target, None))

    released = load(write(tmp_path / "released", raw_config(), raw_tensors(target)), target)
    assert engines.answers_of(run(target, released)) == plain

    training.write_dataset(tmp_path / "data", training.counting_language(20, 24))
    recipe = training.recipe(
        tmp_path, target={"model": str(model)}, head={"aux_hidden_state_layer_ids": [1, 2, 3]}
    )
    TrainingRun(assemble(recipe, target, head_rope(load_config(model))))()
    trained = load(tmp_path / "run" / "head", target)
    expected = run(target, trained)
    assert engines.answers_of(expected) == plain

    for layout in ("vllm", "speculators"):
        out = tmp_path / layout
        export_head(str(tmp_path / "run" / "head"), str(model), out, layout, mask_token_id=MASK)
        again = run(target, load(out, target))
        assert engines.answers_of(again) == plain
        assert drafts(again) == drafts(expected)


@pytest.mark.parametrize("name", ["gemma4", "granite"])
def test_training_sees_the_logits_that_the_target_samples_from(name: str, tmp_path: Path) -> None:
    """Capped or scaled, not the bare product with the output table."""
    model = tmp_path / "model"
    save_reference(model, FAMILIES[name]())
    target = target_of(model, torch.float32)
    training.write_dataset(tmp_path / "data", training.counting_language(20, 24))
    recipe = training.recipe(
        tmp_path, target={"model": str(model)}, head={"aux_hidden_state_layer_ids": [1, 2, 3]}
    )
    setup = assemble(recipe, target, head_rope(load_config(model)))
    losses, table = setup.trainer.losses, target.lm_head.weight
    states = torch.randn(5, 32)
    assert losses.adjusted is not None
    seen = losses.adjusted(states @ table.t())
    assert torch.allclose(seen, target.logits(states), atol=1e-5)
    assert not torch.allclose(seen, states @ table.t(), atol=0.1)
    layerless = load_layerless(model, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.allclose(layerless.logits(states), seen, atol=1e-5)


@pytest.mark.slow
def test_compiled_layers_leave_low_bit_experts_to_their_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced, they would be expanded: gpu_takes says no to a compiler."""
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", eager)
    config = DecoderConfig.from_transformers(FAMILIES["gpt-oss"](intermediate_size=32))
    target = TargetModel(config.with_experts_as(MXFP4)).requires_grad_(False)
    for experts in target.modules():
        if isinstance(experts, LowBitMatrices):
            experts.values.data.zero_()
            experts.scales.data.fill_(120)
    compile_layers(target, UNEVEN.make_head(target))
    compiling: list[bool] = []

    def takes(x: torch.Tensor) -> bool:
        compiling.append(torch.compiler.is_compiling())
        return False

    monkeypatch.setattr(experts_module, "gpu_takes", takes)
    places = torch.arange(3)
    with torch.no_grad():
        target(places, places, causal_attention(places))
    assert compiling == [False] * 2 * config.num_hidden_layers
