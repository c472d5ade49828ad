"""Hidden states from vLLM on the command line: captured like the target's own, and the server."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from peagle.checkpoints.targets import load_target
from peagle.data.dataset import Dataset
from peagle.data.packing import pack
from peagle.train.features.capture import StoredFeatures
from tests.train.states_server import FakeVllm, serving_states

from .fakes import Shell


def test_states_captured_through_vllm_are_those_of_the_embedded_target(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    arguments = ("capture", data, "--model", model, "--device", "cpu")
    assert command(*arguments, "--out", str(tmp_path / "own")) == 0
    target = load_target(Path(model), dtype=torch.float32, device=torch.device("cpu"))
    with serving_states(FakeVllm(target, (2, 3, 6), tmp_path)) as fake:
        through = ("--backend", "vllm", "--vllm", f"endpoint={fake.url}")
        assert command(*arguments, "--out", str(tmp_path / "vllm"), *through) == 0
    dataset = Dataset(Path(data))
    row = pack(dataset, [0, 3], int(dataset.lengths[[0, 3]].sum()))
    own, through_vllm = (
        StoredFeatures(tmp_path / name, model, (2, 3, 3), dataset, torch.zeros(1)).fetch(row)
        for name in ("own", "vllm")
    )
    torch.testing.assert_close(
        own.aux_hidden_states, through_vllm.aux_hidden_states, rtol=1e-2, atol=1e-2
    )
    torch.testing.assert_close(own.states, through_vllm.states, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--vllm", "requests=3"), "--backend vllm"),
        (("--backend", "vllm", "--quantization", "fp8"), "args=[--quantization=fp8]"),
        (("--backend", "vllm", "--vllm", "request=3"), "did you mean 'requests'"),
        (("--backend", "vllm", "--vllm", "requests=0"), "out of range"),
        (("--backend", "vllm", "--vllm", "endpoint=http://127.0.0.1:9"), "no vLLM server"),
    ],
)
def test_mistakes_are_one_line(
    command: Shell, model: str, data: str, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    assert command("capture", data, "--model", model, "--out", str(tmp_path), *flags) == 2
    assert message in command.err


def test_the_server_for_a_recipe_is_printed_as_one_command(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"target: {{model: {model}}}\ndata: {{path: {data}, features: vllm}}\n"
        "schedule: {steps: 1}\nvllm: {args: [--tensor-parallel-size=8], device: cuda}\n"
    )
    assert command("train", str(recipe), "--vllm-command") == 0
    words = shlex.split(command.out)
    assert words[:3] == ["vllm", "serve", model]
    assert words[-1] == "--tensor-parallel-size=8"
    longest = int(Dataset(Path(data)).lengths.max())
    assert f"--max-model-len={longest + 1}" in words
