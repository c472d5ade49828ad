"""docs/models.md: which targets the embedded engine runs, by what, and what they need.

    python docs/models_page.py

Families and paths come from the sources and from the configs that the tests run; memory is counted
on modules without values. A test compares the page with what this script would write.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("models.md")
CONTEXT = 8192

INTRODUCTION = """\
<!-- Written by docs/models_page.py. Do not edit. -->
# Models

Which targets the embedded engine runs, and by what. vLLM runs what vLLM runs:
[serving](serving.md). To hold a head against a target before anything is downloaded but the two
configs:

```bash
peagle doctor amazon/gpt-oss-20b-p-eagle --model openai/gpt-oss-20b
```

## Native families

"""

CHECKS = """

**Kernels**: on a GPU whole layers are fused Triton kernels in CUDA graphs, on a CPU one call of C.
**Modules**: the same steps, caches and graphs, with a layer's operations one by one; on a GPU a
grouped product for the experts, torch's or, of low-bit ones, [our own](kernels.md).

What is checked, at tiny sizes with random weights:

- Every config of the table (`tests/models/test_target_parity.py`): logits and the hidden state
  after every layer are those of transformers, in one pass and in chunks through the paged cache.
- One or two of each family (`tests/engine/test_families.py`): greedy output is that of
  transformers' `generate`, token for token: plain, with n-gram, EAGLE-3 and P-EAGLE drafts, in
  chains and trees, beyond the sliding window, and when requests are preempted.

## Memory of published sizes

On a GPU in bfloat16, without the head and without what steps need. Experts of low-bit checkpoints
stay as they are stored, while they are loaded, too: MXFP4 (GPT-OSS), and FP8 with scales of blocks
of 128 x 128. On a CPU they are expanded to the last column's size, and so is every other low-bit
weight anywhere, such as the attention's of an FP8 checkpoint; a warning says how much. What a
sliding window has passed is freed: beyond it a token takes the room of the other layers alone.

"""

REST = """

## Any other causal language model

Families without a native implementation run by transformers' own modules. That is slower, a warning
says so, and the output is still exactly the model's own. A trial when the model is loaded chooses
between two ways:

| way | for | how | drafts |
| --- | --- | --- | --- |
| paged | models whose only memory is keys and values (tested: {paged}) | attention reads and \
writes the engine's paged cache; batching, roll-back and preemption are the engine's own | chains \
and trees |
| recomputed | all others: recurrent layers, convolutions, attention biases, embeddings of layers \
(tested: \
{recomputed}) | each step computes the whole text again, so nothing has to be rolled back | chains |

Not offered for them: training and `peagle capture` with the target in this process,
`quantization=fp8`, CUDA graphs. An architecture that neither way can run is refused with one line.

## Limits

- Layers that run by modules have no `batch_invariant` and no `quantization=fp8`.
- A layer with a sliding window keeps whole blocks, of what the rows of a step may see: up to
  `max_num_batched_tokens` more than the window while a prompt is read. A head whose keys are wider
  than the target's keeps every layer's whole text.
- Layers whose keys are narrower than the widest ones (Gemma-4's) take the widest one's room in the
  cache.
- Of low-bit checkpoints the experts alone stay low-bit. FP8 needs a GPU of compute capability 8.9,
  MXFP4 one of 8.0. FP8 experts whose gates end inside a block are expanded.
- Gemma-3n and Gemma-4's small models (E2B, E4B) look tokens up in a table for each layer and share
  keys: they run by transformers' modules, recomputed. Gemma-3n takes no head, since its layers hand
  on several states of each token; it drafts by n-gram.
- A model whose tokens see the ones behind them is refused: a draft would change what stands before
  it.
- Images and sound: of a multimodal checkpoint the text model is loaded alone.
- A rope that changes with the length of the text (`longrope`, `dynamic`) is refused: drafts
  verified beyond the change would turn tokens differently from plain decoding.
"""


class Size(NamedTuple):
    """A published model: the name, its config class and what differs from the class's defaults."""

    name: str
    kind: str
    options: dict[str, Any]
    quantization: dict[str, Any] | None = None


MXFP4 = {"quant_method": "mxfp4"}
QWEN3_CODER = {"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True}
SIZES = (
    Size(
        "openai/gpt-oss-20b",
        "GptOssConfig",
        {"num_hidden_layers": 24, "num_local_experts": 32},
        MXFP4,
    ),
    Size("openai/gpt-oss-120b", "GptOssConfig", {}, MXFP4),
    Size("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3MoeConfig", QWEN3_CODER),
    Size(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8",
        "Qwen3MoeConfig",
        QWEN3_CODER,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    Size(
        "google/gemma-4-31B-it",
        "Gemma4TextConfig",
        {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "final_logit_softcapping": 30.0,
        },
    ),
)


def main() -> None:
    PAGE.write_text(models_page(), encoding="utf-8")


def models_page() -> str:
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from tests.tiny.families import ADAPTED, RECOMPUTED, SEVERAL_STATES

    recomputed = [*RECOMPUTED, *SEVERAL_STATES]
    ways = {"paged": ", ".join(ADAPTED), "recomputed": ", ".join(recomputed)}
    return "".join((INTRODUCTION, families(), CHECKS, memory(), REST.format(**ways)))


def families() -> str:
    from peagle.models.config import SUPPORTED_MODEL_TYPES, DecoderConfig
    from tests.tiny.families import FAMILIES

    rows = []
    for family in SUPPORTED_MODEL_TYPES:
        own = {n: f() for n, f in FAMILIES.items() if f.kind.model_type == family}
        decoders = [DecoderConfig.from_transformers(config) for config in own.values()]
        paths = {"kernels" if d.has_standard_layers else "modules" for d in decoders}
        rows.append([f"`{family}`", " or ".join(sorted(paths)), features(decoders), ", ".join(own)])
    return table(["model type", "layers run by", "what it may have", "tested configs"], rows)


def features(decoders: Sequence[Any]) -> str:
    """What sets the family apart, read off its decoders."""
    named = {
        "biases": lambda d: d.qkv_bias,
        "sliding windows": lambda d: any(d.sliding_windows),
        "norms of queries and keys": lambda d: d.qk_norm,
        "experts": lambda d: d.experts is not None,
        "attention sinks": lambda d: d.sinks,
        "norms around": lambda d: d.norm_places == "around",
        "norms behind": lambda d: d.norm_places == "after",
        "two kinds of attention": lambda d: d.full_attention is not None,
        "caps": lambda d: d.score_cap is not None or d.logit_cap is not None,
        "scales": lambda d: d.residual_scale != 1.0,
        "partial rope": lambda d: (
            d.full_attention is None and 2 * len(d.inverse_frequencies) < d.head_dim
        ),
    }
    return ", ".join(name for name, has in named.items() if any(map(has, decoders)))


def memory() -> str:
    import transformers

    from peagle.engine.memory import target_memory
    from peagle.models.config import DecoderConfig
    from peagle.models.target import default_aux_hidden_state_layers

    rows = []
    for size in SIZES:
        config = getattr(transformers, size.kind)(**size.options)
        config.quantization_config = size.quantization
        need = target_memory(DecoderConfig.from_transformers(config))
        token = need.token_bytes(torch.bfloat16)
        beyond = need.token_bytes(torch.bfloat16, beyond_windows=True)
        layers = default_aux_hidden_state_layers(config.num_hidden_layers)
        rows.append(
            [
                size.name,
                f"{need.num_parameters / 1e9:.1f} B",
                f"{need.weight_bytes(torch.bfloat16) / 2**30:.0f} GiB",
                f"{token / 2**10:.0f} KiB",
                f"{beyond / 2**10:.0f} KiB",
                f"{need.cache_bytes(torch.bfloat16, CONTEXT) / 2**30:.1f} GiB",
                ", ".join(map(str, layers)),
                f"{need.num_parameters * torch.bfloat16.itemsize / 2**30:.0f} GiB",
            ]
        )
    text = f"cache of {CONTEXT:,} tokens"
    header = ["model", "parameters", "weights", "cache per token", "beyond the windows", text]
    return table([*header, "aux layers unless told", "weights, expanded"], rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
