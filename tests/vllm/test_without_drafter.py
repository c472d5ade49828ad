"""vLLM without a drafter behind our contract: sampling, stops, the command line, prepare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from peagle import SamplingParams
from peagle.backends.vllm.backend import VllmBackend
from peagle.cli.main import main
from peagle.config import EngineConfig
from peagle.data.dataset import Dataset
from peagle.errors import BackendError
from tests.vllm.interop import embedded, vllm
from tests.vllm.released_head import CONTEXT, write_target

pytestmark = pytest.mark.vllm

TINY = EngineConfig(dtype="float32", max_model_len=CONTEXT, max_num_seqs=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def backend(target: str) -> Iterator[VllmBackend]:
    with vllm(target, engine=TINY) as opened:
        yield opened


def test_n_answers_come_back_as_n_answers(backend: VllmBackend) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    (output,) = backend.generate("abc", params)
    assert [len(answer.token_ids) for answer in output.outputs] == [8, 8, 8]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
    *_, streamed = backend.stream("abc", params)
    assert [a.token_ids for a in streamed.outputs] == [a.token_ids for a in output.outputs]


def test_all_that_needs_no_drafter_is_served(backend: VllmBackend) -> None:
    params = SamplingParams(
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        logit_bias={5: 2.0},
        repetition_penalty=1.1,
        bad_words=["x"],
        min_tokens=4,
        max_tokens=12,
        seed=1,
        num_speculative_tokens=0,
    )
    (output,) = backend.generate("abc", params)
    assert 4 <= len(output.outputs[0].token_ids) <= 12
    assert output.outputs[0].finish_reason in ("stop", "length")


def test_a_stop_token_ends_both_engines_at_the_same_place(
    backend: VllmBackend, target: str
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    (whole,) = backend.generate("abc", greedy)
    stop = whole.outputs[0].token_ids[9]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=[stop])
    (theirs,), (ours,) = (
        engine.generate("abc", params) for engine in (backend, embedded(target, engine=TINY))
    )
    a, b = theirs.outputs[0], ours.outputs[0]
    assert a.token_ids == b.token_ids
    assert a.finish_reason == b.finish_reason == "stop"
    assert a.stop_reason == b.stop_reason == stop


def test_times_are_in_order(backend: VllmBackend) -> None:
    (output,) = backend.generate("abc")
    times = output.metrics
    assert times.first_token_time is not None
    assert times.finished_time is not None
    assert times.arrival_time < times.first_token_time <= times.finished_time


def test_the_command_line_prints_data_alone_on_stdout(
    target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    line = "generate TARGET abc --backend vllm --raw --json --max-tokens 12 --max-model-len 64"
    extra = "--enforce-eager --kv-cache-memory-bytes 100000000 --ignore-eos"
    assert main([target if w == "TARGET" else w for w in f"{line} {extra}".split()]) == 0
    out = capfd.readouterr().out
    (answer,) = json.loads(out)["results"][0]["outputs"]
    (ours,) = embedded(target, engine=TINY).generate(
        "abc", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    )
    assert answer["token_ids"] == ours.outputs[0].token_ids


def test_prepare_makes_the_same_dataset_with_either_backend(target: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": f"p{n}", "prompt": f"say {n}"}) for n in range(6)]
    prompts.write_text("\n".join(lines))
    rows = {}
    for backend, extra in (
        ("embedded", ""),
        ("vllm", "--enforce-eager --kv-cache-memory-bytes 100000000"),
    ):
        out = tmp_path / backend
        line = f"prepare --model {target} --prompts {prompts} --out {out} --raw --max-tokens 20"
        assert main(f"{line} --max-model-len 128 --backend {backend} {extra}".split()) == 0
        data = Dataset(out)
        rows[backend] = {
            row.id: (list(map(int, row.token_ids)), list(map(int, row.loss_mask))) for row in data
        }
    assert len(rows["vllm"]) == 6
    assert rows["vllm"] == rows["embedded"]


def test_a_closed_backend_says_so(target: str) -> None:
    with vllm(target, engine=TINY) as opened:
        pass
    opened.close()  # a second time is no error
    with pytest.raises(BackendError, match="ended"):
        opened.generate("abc")
