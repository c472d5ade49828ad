"""What one step costs on a GPU: plain, draft and verify by K, concurrency and context.

    python benchmarks/step_costs.py --shape qwen3-8b --out FILE
    python benchmarks/step_costs.py --model smollm2-135m --head smollm2-135m-p-eagle ...

Weights of a shape are random: a step's time does not depend on their values, while its acceptance
would. With the table a reader can see which acceptance length pays off where: a step of P-EAGLE
costs `step` milliseconds and gives as many tokens as the acceptance length, a plain step one.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from peagle.checkpoints.heads.loading import load_head
from peagle.checkpoints.references import resolve_model
from peagle.checkpoints.targets import load_target
from peagle.config import EngineConfig
from peagle.engine.engine import Engine, Speculation
from peagle.engine.runner import BATCH_SIZES, padded
from peagle.engine.step import Step, StepShape, Verified
from peagle.files import write_json
from peagle.models.config import DecoderConfig
from peagle.models.eagle import EagleNetwork, shared_tables
from peagle.models.eagle3 import Eagle3Drafter
from peagle.models.head_config import HeadConfig
from peagle.models.p_eagle import PEagleDrafter
from peagle.models.target import TargetModel, default_aux_hidden_state_layers
from peagle.provenance import provenance

WARM_UPS, REPLAYS = 2, 10
HEADROOM = 512  # tokens that replays may add before a request ends
QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}


def random_target(device: torch.device, sizes: dict[str, Any]) -> TargetModel:
    config = DecoderConfig.from_transformers(Qwen3Config(**sizes))
    with torch.device("meta"):
        target = TargetModel(config)
    filled: TargetModel = _filled(target, device)
    return filled


def random_head(target: TargetModel, method: str, layers: int) -> EagleNetwork:
    c = target.config
    config = HeadConfig(
        method="p-eagle" if method == "p-eagle" else "eagle3",
        target_model="random",
        target_hidden_size=c.hidden_size,
        target_num_hidden_layers=c.num_hidden_layers,
        vocab_size=c.vocab_size,
        aux_hidden_state_layer_ids=default_aux_hidden_state_layers(c.num_hidden_layers),
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        draft_vocab_size=c.vocab_size,
        max_speculative_tokens=16,
        num_speculative_tokens=5,
    )
    with torch.device("meta"):
        network = EagleNetwork(config, shared_tables(target))
    filled: EagleNetwork = _filled(network, target.embed_tokens.weight.device)
    filled.target_ids = torch.arange(c.vocab_size, device=filled.fc.weight.device)
    return filled


def _filled(module: Any, device: torch.device) -> Any:
    """Small random weights made on the device itself; tables that were never meta keep theirs."""
    tables = {name: b for name, b in module.named_buffers() if not b.is_meta}
    module.to_empty(device=device)
    for name, table in tables.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = table.to(device)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.02)
        parameter.data = parameter.data.to(torch.bfloat16)
    return module.requires_grad_(False).eval()


def timers() -> tuple[Any, Any]:
    begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return begun, ended


def milliseconds(function: Callable[[], object]) -> float:
    """Median time of a CUDA graph of the function; without a GPU, a rehearsal, of the function."""
    if not torch.cuda.is_available():
        begun_at = perf_counter()
        function()
        return 1000 * (perf_counter() - begun_at)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times: list[float] = []
    for n in range(WARM_UPS + REPLAYS):
        begun, ended = timers()
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        if n >= WARM_UPS:
            times.append(begun.elapsed_time(ended))
    return statistics.median(times)


class Bench:
    """One engine whose slots are put at a context by hand; requests are never asked for."""

    def __init__(self, target: TargetModel, drafter: Any, args: argparse.Namespace) -> None:
        config = EngineConfig(
            max_model_len=max(args.context) + HEADROOM,
            max_num_seqs=max(args.concurrency),
            max_num_batched_tokens=1024,
        )
        speculation = None if drafter is None else Speculation(drafter, max(args.depths))
        self.engine = Engine(target, config, speculation=speculation, static_shapes=True)
        self.models = models = self.engine.runner.models
        # Nobody writes the context: what memory happens to hold may be NaN, which would end slots.
        paged = [models.model, *([models.drafting.model] if models.drafting else [])]
        for cache in (model.cache for model in paged):
            cache.keys.zero_()
            cache.values.zero_()

    def place(self, batch: int, context: int, depth: int) -> bool:
        """False if the cache cannot hold that many tokens."""
        allocator, state = self.engine.allocator, self.models.state
        per_slot = allocator.blocks_for(context + HEADROOM)
        if batch * per_slot > allocator.num_blocks:
            return False
        blocks = torch.arange(batch * per_slot, dtype=torch.int32).view(batch, per_slot)
        state.block_tables[:, :batch, :per_slot] = blocks.to(state.block_tables.device)
        state.num_computed[:batch] = context
        state.limits[:batch] = context + HEADROOM
        state.num_prompt[:batch] = 1
        state.max_drafts[:batch] = depth
        state.num_drafts[:batch] = depth
        state.capacity[:batch] = per_slot * allocator.block_size
        return True

    def step(self, batch: int, depth: int, context: int) -> Step:
        splits = self.engine.runner.num_splits(batch, context)
        size = padded(batch, BATCH_SIZES)
        step = Step(self.models, StepShape(size, depth, "greedy", num_splits=splits))
        step.fields.slots[:batch] = torch.arange(batch)
        step.fields.caps.fill_(depth)
        return step

    @torch.inference_mode()
    def costs(self, batch: int, depth: int, context: int) -> dict[str, float] | None:
        if not self.place(batch, context, depth):
            return None
        step = self.step(batch, depth, context)

        def restart() -> None:
            """A replay must not wander off."""
            self.models.state.num_computed[:batch] = context

        def verify() -> Verified:
            restart()
            return step.verify()

        def whole() -> Tensor:
            restart()
            return step()

        costs = {"verify_ms": milliseconds(verify)}
        if depth:
            verified = verify()
            assert int(verified.committed.num_drafts[:batch].min()) == depth, "a slot has ended"
            costs["draft_ms"] = milliseconds(lambda: step.draft(verified))
        costs["step_ms"] = milliseconds(whole)
        return costs


def drafters_for(target: TargetModel, args: argparse.Namespace) -> dict[str, Any]:
    device = target.embed_tokens.weight.device
    if args.model:
        heads = [load_head(h, target, dtype=torch.bfloat16, device=device) for h in args.head]
    else:
        heads = [random_head(target, "p-eagle", 4), random_head(target, "eagle3", 1)]
    makers = {"p-eagle": PEagleDrafter, "eagle3": Eagle3Drafter}
    return {h.config.method: makers[h.config.method](h.requires_grad_(False)) for h in heads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a target with its --head; otherwise --shape")
    parser.add_argument("--head", nargs="*", default=[])
    parser.add_argument("--shape", choices=["qwen3-8b", "tiny"], default="qwen3-8b")
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 5, 7, 11])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    device = torch.device(args.device)
    sizes = QWEN3_8B if args.shape == "qwen3-8b" else QWEN3_8B | {"num_hidden_layers": 4}
    target = (
        load_target(resolve_model(args.model), dtype=torch.bfloat16, device=device)
        if args.model
        else random_target(device, sizes)
    )
    if args.quantization:
        from peagle.models.fp8 import quantize_linears

        quantize_linears(target)
    rows: list[dict[str, Any]] = []
    for method, drafter in {"none": None, **drafters_for(target, args)}.items():
        bench = Bench(target, drafter, args)
        for context in args.context:
            for batch in args.concurrency:
                for depth in [0] if drafter is None else args.depths:
                    cell = {"method": method, "K": depth, "concurrency": batch, "context": context}
                    cell |= bench.costs(batch, depth, context) or {"does_not_fit": True}
                    rows.append(cell)
                    print(json.dumps(cell), flush=True)
                    write(rows, args)  # an interrupted run keeps what it has
        del bench
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def for_simulate(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as `peagle simulate --costs` reads it: seconds by part of a step."""
    parts = []
    for row in rows:
        if row.get("does_not_fit"):
            continue
        place = {"concurrency": row["concurrency"], "context": row["context"]}
        if row["method"] == "none":
            parts.append({"part": "plain", "seconds": row["step_ms"] / 1000} | place)
            continue
        place |= {"method": row["method"], "k": row["K"]}
        other = max(row["step_ms"] - row["verify_ms"] - row["draft_ms"], 0.0)
        for part, ms in (
            ("verify", row["verify_ms"]),
            ("draft", row["draft_ms"]),
            ("other", other),
        ):
            parts.append({"part": part, "seconds": ms / 1000} | place)
    return parts


def write(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    workload = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    document = {
        "steps": rows,
        "step_costs": for_simulate(rows),
        "workload": workload,
        "provenance": provenance(probe_torch=True),
    }
    if args.out:
        write_json(args.out, document)


if __name__ == "__main__":
    main()
