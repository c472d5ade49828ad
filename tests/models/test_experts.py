"""Three forms of the experts' products agree: by expert, grouped, and every row through each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peagle.kernels.cpu.library import cpu_library
from peagle.kernels.reference.experts import MXFP4, LowBitForm
from peagle.models import experts as module
from peagle.models.binding import pack_weights
from peagle.models.config import DecoderConfig
from peagle.models.experts import Experts, MixtureOfExperts, Routing
from peagle.models.target import TargetModel
from tests.tiny.families import FAMILIES
from tests.tiny.models import randomise
from tests.tolerance import near


def mixture(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> MixtureOfExperts:
    # Multiples of 16 bytes, as the GPU's grouped product wants them.
    sizes = {"hidden_size": 32, "intermediate_size": 48}
    sizes |= {"moe_intermediate_size": 48} if name == "qwen3-moe" else {}
    target = TargetModel(DecoderConfig.from_transformers(FAMILIES[name](**sizes)))
    randomise(target, scale=0.3)
    found = target.layers[0].mlp
    assert isinstance(found, MixtureOfExperts)
    return found.to(device, dtype).requires_grad_(False)


def by_definition(experts: Experts, x: Tensor, routing: Routing) -> Tensor:
    """Each row alone."""
    return torch.cat(
        [
            experts._dense(row[None], Routing(index[None], weights[None]))
            for row, index, weights in zip(x, *routing, strict=True)
        ]
    )


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_all_forms_agree(name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = mixture(name), torch.randn(num_rows, 32)
    routing = block.router(x)
    assert routing.experts.shape == (num_rows, 3)
    if name == "gpt-oss":
        assert torch.allclose(routing.weights.sum(-1), torch.ones(num_rows))
    expected = by_definition(block.experts, x, routing)
    tolerance = near(expected, terms=48)
    torch.testing.assert_close(block(x), expected, **tolerance)
    torch.testing.assert_close(block.experts._dense(x, routing), expected, **tolerance)
    monkeypatch.setattr(module, "grouped_linear", module._by_grouped_mm)
    torch.testing.assert_close(block(x), expected, **tolerance)


@pytest.mark.skipif(cpu_library() is None, reason="no compiled kernels")
@torch.no_grad()
def test_a_row_has_the_same_bits_beside_others() -> None:
    """Where all of it is our kernels': torch's sigmoid has other bits at the end of a tensor."""
    block, x = mixture("qwen3-moe"), torch.randn(9, 32)
    pack_weights(block)
    routing = block.router(x)
    together = block.experts(x, routing)
    for n in range(len(x)):
        own = Routing(*(part[n : n + 1] for part in routing))
        assert torch.equal(block.experts(x[n : n + 1], own), together[n : n + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
@torch.no_grad()
def test_the_grouped_product_of_a_gpu_is_captured_and_agrees(name: str) -> None:
    block, x = mixture(name, "cuda", torch.bfloat16), torch.randn(64, 32).cuda().bfloat16()
    assert module._has_grouped_mm(x)
    expected = block.experts._dense(x, block.router(x))
    block(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block(x)
    x.copy_(x.flip(0))
    graph.replay()
    torch.testing.assert_close(out, expected.flip(0), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
@torch.no_grad()
def test_low_bit_experts_by_the_kernel_are_the_references(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = MXFP4 if name == "gpt-oss" else LowBitForm("fp8", 16, 32)
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    sizes |= {"moe_intermediate_size": 64} if name == "qwen3-moe" else {}
    config = DecoderConfig.from_transformers(FAMILIES[name](**sizes)).with_experts_as(form)
    assert config.experts is not None
    block = MixtureOfExperts(config, config.experts)
    randomise(block.router, scale=0.3)
    for parameter in block.experts.parameters():
        if parameter.dtype == torch.uint8:
            parameter.data = torch.randint(118, 122, parameter.shape).to(torch.uint8)
        else:
            parameter.data = (0.3 * torch.randn(parameter.shape)).to(parameter.dtype)
    x = torch.randn(2, 32)
    expected = block(x)
    monkeypatch.setattr(module, "gpu_takes", lambda x: True)
    torch.testing.assert_close(block(x), expected, **near(expected, terms=64, depth=2))
