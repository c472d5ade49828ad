"""8-bit weights: what is quantised, how well, and that rows do not look at each other."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from peagle.errors import ConfigError
from peagle.kernels.reference.fp8 import FP8, LARGEST, quantize_rows
from peagle.models import fp8
from peagle.models.attention import causal_attention
from peagle.models.fp8 import Fp8Linear, check_gpu, quantize_linears
from peagle.models.layers import Linear
from peagle.models.target import TargetModel
from tests.tiny.models import UNEVEN
from tests.tolerance import near

HALF_STEP = 2.0**-4  # of e4m3's three bits behind the leading one, relative


def quantised(model: TargetModel) -> TargetModel:
    model = copy.deepcopy(model)
    quantize_linears(model)
    return model


def target(dtype: torch.dtype = torch.float32, **changes: object) -> TargetModel:
    return UNEVEN.make_target(dtype, intermediate_size=48, **changes)


def logits(model: TargetModel, length: int = 12) -> torch.Tensor:
    positions = torch.arange(length)
    with torch.inference_mode():
        out = model(UNEVEN.tokens(length), positions, causal_attention(positions))
        return model.logits(out.hidden)


@given(st.integers(0, 1000), st.floats(1e-20, 1e20))
def test_each_number_is_kept_to_half_a_step_and_the_largest_exactly(seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = size * torch.randn(3, 40, generator=generator)
    quantized, scales = quantize_rows(x)
    restored = quantized.float() * scales
    smallest_normal = 2.0**-6 * scales
    allowed = torch.maximum(x.abs() * HALF_STEP, smallest_normal * HALF_STEP)
    assert ((restored - x).abs() <= allowed * (1 + 1e-5)).all()
    assert (quantized.float().abs().amax(dim=1) == LARGEST).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_row_has_the_same_numbers_alone_and_beside_others(dtype: torch.dtype) -> None:
    x = torch.randn(5, 32).to(dtype)
    x[3] *= 100
    x[4] = 0
    together = quantize_rows(x)
    for row in range(5):
        alone = quantize_rows(x[row : row + 1])
        assert torch.equal(alone[0].float(), together[0][row : row + 1].float())
        assert torch.equal(alone[1], together[1][row : row + 1])
    assert not together[0][4].float().any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_spoils_its_row_alone(bad: float) -> None:
    linear = Fp8Linear(Linear(32, 16))
    x = torch.randn(3, 32)
    x[1, 5] = bad
    assert torch.isfinite(linear(x)).all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_restored_matrices(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = Linear(48, 32, bias=bias).to(dtype)
    x = torch.randn(7, 48).to(dtype)
    rows, weight = (q.double() * s for q, s in map(quantize_rows, (x, linear.weight.detach())))
    expected = rows @ weight.t() + (linear.bias.double() if bias else 0)
    out = Fp8Linear(linear)(x)
    assert out.dtype == dtype
    close = {"rtol": 2**-7, "atol": 2**-6} if dtype is torch.bfloat16 else near(terms=48)
    torch.testing.assert_close(out.double(), expected, **close)


def test_four_products_of_each_layer_are_quantised_and_nothing_else() -> None:
    model = target(attention_bias=True)
    before = copy.deepcopy(model)
    quantize_linears(model)
    found = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert found == {f"layers.{layer}.{name}" for layer in range(4) for name in names}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner in found and leaf != "bias":
            assert parameter.dtype == (FP8 if leaf == "weight" else torch.float32)
            assert not parameter.requires_grad
        else:
            assert torch.equal(parameter, before.get_parameter(name))


def test_logits_are_near_those_of_the_model_as_it_was() -> None:
    model = target()
    original, ours = logits(model), logits(quantised(model))
    assert not torch.equal(original, ours)
    # each product is off by some 4 %, and four random layers add up
    assert (ours - original).norm() < 0.2 * original.norm()
    assert (ours.argmax(-1) == original.argmax(-1)).float().mean() > 0.7


def test_a_module_that_was_bound_before_is_not_used_any_more() -> None:
    """Kernels and callers may have looked a module up: it must not compute with old weights."""
    model = target()
    old = model.layers[0].get_submodule("self_attn.qkv_proj")
    weight = old.get_parameter("weight")  # held, so that nothing else gets its address
    quantize_linears(model)
    assert dict(old.named_parameters()) == {}
    assert weight.data_ptr() not in {p.data_ptr() for p in model.parameters()}


def test_no_second_copy_of_the_model_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    old = [m for layer in model.layers for m in layer.modules() if isinstance(m, nn.Linear)]
    still_there: list[int] = []

    class Counting(Fp8Linear):
        def __init__(self, linear: nn.Linear) -> None:
            still_there.append(sum(m.weight is not None for m in old))
            super().__init__(linear)

    monkeypatch.setattr(fp8, "Fp8Linear", Counting)
    quantize_linears(model)
    assert still_there == list(range(len(old), 0, -1))


def test_sizes_that_the_product_does_not_take_are_refused_before_anything_changes() -> None:
    model = UNEVEN.make_target(torch.float32, intermediate_size=40)
    with pytest.raises(ConfigError, match="multiples of 16, but down_proj is 32 x 40"):
        quantize_linears(model)
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"capability 8\.9, this one has 8\.0"):
        check_gpu(torch.device("cuda"))
    check_gpu(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_gpu(torch.device("cuda"))
