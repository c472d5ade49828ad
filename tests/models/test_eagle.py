"""The network that both drafters share: its start, its tables, its config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from peagle.errors import HeadError, ModelError
from peagle.kernels.cpu.linear import linear_kernel, unpacked
from peagle.models.attention import causal_attention
from peagle.models.binding import pack_weights
from peagle.models.config import DecoderConfig
from peagle.models.eagle import EagleNetwork, initialise, shared_tables
from peagle.models.layers import RMSNorm, matrix_of
from peagle.models.target import default_aux_hidden_state_layers
from tests.tiny.models import UNEVEN, randomise
from tests.tolerance import near

OWN_TABLES = {"has_embed_tokens": True, "has_lm_head": True}


def started(method: str, seed: int = 5, **changes: Any) -> EagleNetwork:
    target = UNEVEN.make_target()
    network = EagleNetwork(UNEVEN.head_config(method, **changes), shared_tables(target))
    network.to(torch.float64)
    if network.config.reduced_vocabulary:
        network.target_ids = torch.arange(58, -1, -1)[: network.config.draft_vocab_size]
    initialise(network, target, torch.Generator().manual_seed(seed))
    return network


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("changes", [{}, OWN_TABLES, {**OWN_TABLES, "draft_vocab_size": 23}])
def test_starting_weights_are_finite_and_depend_on_the_generator_alone(
    method: str, changes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    first = started(method, **changes)
    torch.manual_seed(1)
    second, other = started(method, **changes), started(method, seed=6, **changes)
    for (name, a), b, c in zip(
        first.named_parameters(), second.parameters(), other.parameters(), strict=True
    ):
        assert bool(a.isfinite().all()), name
        assert torch.equal(a, b), name
        drawn = "norm" not in name and name not in (
            "embed_tokens.weight",
            "lm_head.weight",
            "mask_embedding",
        )
        assert torch.equal(a, c) != drawn, name
        assert bool(a.any()), name


def test_starting_tables_are_the_targets() -> None:
    target = UNEVEN.make_target()
    network = started("p-eagle", **OWN_TABLES, draft_vocab_size=23)
    assert network.embed_tokens is not None
    assert network.lm_head is not None
    assert torch.equal(network.embed_tokens.weight, target.embed_tokens.weight)
    assert torch.equal(network.lm_head.weight, target.lm_head.weight[network.target_ids])
    torch.testing.assert_close(network.mask_embedding, target.embed_tokens.weight.mean(0))


def test_starting_matrices_are_small() -> None:
    for name, weight in started("p-eagle", **OWN_TABLES).state_dict().items():
        if "proj" in name or name in ("fc.weight", "mask_hidden"):
            assert 0.012 < float(weight.std()) < 0.028, name
            assert abs(float(weight.mean())) < 0.005, name


def test_a_compact_head_owns_none_of_its_targets_weights() -> None:
    target = UNEVEN.make_target()
    network = UNEVEN.make_head(target)
    names = [name for name, _ in network.named_parameters()]
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)
    assert network.embed(torch.tensor([3])).tolist() == [target.embed_tokens.weight[3].tolist()]
    assert network.output_weight() is target.lm_head.weight


def test_a_compact_head_with_a_reduced_vocabulary_takes_its_rows_of_the_targets_table() -> None:
    target = UNEVEN.make_target()
    network = UNEVEN.make_head(target, draft_vocab_size=23)
    assert torch.equal(network.output_weight(), target.lm_head.weight[network.target_ids])


def test_logits_are_float32_at_least() -> None:
    target = UNEVEN.make_target(torch.bfloat16)
    network = UNEVEN.make_head(target)
    hidden = torch.ones(2, 32, dtype=torch.bfloat16)
    assert network.logits(hidden).dtype == target.logits(hidden).dtype == torch.float32
    double = UNEVEN.make_target()
    assert double.logits(torch.ones(2, 32, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = RMSNorm(16, 1e-2).to(dtype), LlamaRMSNorm(16, 1e-2).to(dtype)
    randomise(ours, scale=0.7)
    theirs.weight.data.copy_(ours.weight)
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype == torch.bfloat16:
        # Not all: float32 sums of another order may round to the other side.
        assert (ours(x) == theirs(x)).float().mean() > 0.99
    else:
        torch.testing.assert_close(ours(x), theirs(x), **near(terms=16))


@torch.no_grad()
def test_packing_changes_no_result_and_no_number() -> None:
    target = UNEVEN.make_target(torch.float32, tie_word_embeddings=True)
    network = UNEVEN.make_head(target)
    tokens, positions = UNEVEN.tokens(9), torch.arange(9)

    def run() -> list[torch.Tensor]:
        attention = causal_attention(positions)
        hidden, aux_hidden_states = target(tokens, positions, attention, (1, 2, 4))
        features = network.features(aux_hidden_states)
        drafted = network(network.embed(tokens), features, positions, attention)
        return [target.logits(hidden), aux_hidden_states, network.logits(drafted)]

    before = run()
    weight, table = target.layers[1].mlp.down_proj.weight, target.embed_tokens.weight
    pack_weights(target)
    pack_weights(network)
    assert (network.fc.packed is not None) == (linear_kernel() is not None)
    assert torch.equal(unpacked(matrix_of(target.layers[1].mlp.down_proj)), weight)
    assert torch.equal(unpacked(matrix_of(target.lm_head)), table)
    assert target.embed_tokens.weight is table
    for a, b in zip(before, run(), strict=True):
        torch.testing.assert_close(a, b, **near(a, terms=40, depth=4 + 2))


def test_default_aux_layers_are_early_middle_and_late() -> None:
    assert default_aux_hidden_state_layers(30) == (2, 15, 27)
    assert default_aux_hidden_state_layers(24) == (2, 12, 21)


def test_positions_reach_to_the_end_of_the_context_and_no_further() -> None:
    target = UNEVEN.make_target(max_position_embeddings=70)
    network = UNEVEN.make_head(target, max_position_embeddings=50)
    for module, length in ((target, 70), (network, 50)):
        module.rotary(torch.tensor([length - 1]), torch.float64)
        with pytest.raises(IndexError):
            module.rotary(torch.tensor([length]), torch.float64)


def test_a_head_turns_positions_as_a_target_of_the_same_rope_does() -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    target = UNEVEN.make_target(head_dim=6, rope_parameters=dict(rope))
    network = UNEVEN.make_head(target, rope_parameters=rope)
    assert target.config.rope_scale > 1.1
    assert torch.equal(network.rotary.cos, target.rotary.cos)
    assert torch.equal(network.rotary.sin, target.rotary.sin)


def test_making_a_decoder_leaves_the_heads_config_as_it_was() -> None:
    """transformers writes defaults into the rope parameters it is given."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    config = UNEVEN.head_config(rope_parameters=rope)
    config.decoder()
    assert config.rope_parameters == {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": "medusa"}, "medusa"),
        ({"draft_vocab_size": 60}, "draft_vocab_size 60 exceeds the target's"),
        ({"num_speculative_tokens": 9}, "num_speculative_tokens 9"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"aux_hidden_state_layer_ids": ()}, "aux_hidden_state_layer_ids"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ],
)
def test_a_head_config_that_makes_no_sense_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(HeadError, match=named):
        UNEVEN.head_config(**changes)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "dynamic"),
        ({"rope_type": "llama3", "rope_theta": 1e4}, "factor"),
        ({"rope_theta": "ten thousand"}, "rope_parameters"),
    ],
)
def test_rope_parameters_that_cannot_be_used_are_named(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(HeadError, match=named) as caught:
        UNEVEN.head_config(rope_parameters=rope).decoder()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 48}, "hidden size 32 but the target has 48"),
        ({"vocab_size": 60}, "vocabulary 59 but the target has 60"),
        ({"num_hidden_layers": 5}, "number of layers 4 but the target has 5"),
    ],
)
def test_a_head_for_another_target_says_what_differs(changes: dict[str, int], named: str) -> None:
    other = DecoderConfig.from_transformers(LlamaConfig(**UNEVEN.target | changes))
    with pytest.raises(HeadError, match=f"made for tiny: {named}"):
        UNEVEN.head_config().check_fits(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"aux_hidden_state_layer_ids": (1, 2, 5)},
        {"aux_hidden_state_layer_ids": (-1, 2, 3)},
        {"hidden_size": 20},
        {"hidden_size": 20, "has_embed_tokens": True},
        {"hidden_size": 20, "has_lm_head": True},
    ],
)
def test_a_head_that_cannot_run_on_its_target_is_refused(changes: dict[str, Any]) -> None:
    config = DecoderConfig.from_transformers(LlamaConfig(**UNEVEN.target))
    for fits in ({"aux_hidden_state_layer_ids": (0, 2, 4)}, {"hidden_size": 20, **OWN_TABLES}):
        UNEVEN.head_config(**fits).check_fits(config)
    with pytest.raises(HeadError):
        UNEVEN.head_config(**changes).check_fits(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"model_type": "gpt2"}, "gpt2"),
    ],
)
def test_what_the_native_target_cannot_run_is_named(changes: dict[str, Any], named: str) -> None:
    config = LlamaConfig(**UNEVEN.target)
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(ModelError, match=named) as caught:
        DecoderConfig.from_transformers(config)
    assert caught.value.hint
