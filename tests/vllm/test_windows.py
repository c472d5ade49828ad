"""A head with a sliding window drafts the same in both engines. One vLLM of its own: of two in a
process, closing one breaks the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.vllm.interop import embedded, vllm
from tests.vllm.released_head import HEAD_LAYERS, write_released_head, write_target
from tests.vllm.test_released_layout import GREEDY, TINY, K, prompts

pytestmark = pytest.mark.vllm


def test_a_window_is_the_same_in_both_engines(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    heads = [write_released_head(tmp_path / name, target) for name in ("plain", "windowed")]
    config = json.loads((heads[1] / "config.json").read_text())
    config |= {"sliding_window": 8, "layer_types": ["sliding_attention"] * HEAD_LAYERS}
    (heads[1] / "config.json").write_text(json.dumps(config))
    kept = []
    for head in heads:
        llm = embedded(str(target), str(head), K, TINY)
        given = prompts(llm.engine.target.config.vocab_size)
        ours = llm.generate(given, GREEDY)
        kept.append([output.stats.num_accepted_tokens_per_pos for output in ours])
    with vllm(str(target), str(heads[1]), K, TINY) as backend:
        theirs = backend.generate(given, GREEDY)
    for mine, other in zip(ours, theirs, strict=True):
        assert other.outputs[0].token_ids == mine.outputs[0].token_ids
    assert [output.stats.num_accepted_tokens_per_pos for output in theirs] == kept[1]
    assert kept[0] != kept[1], "the window changes nothing"
