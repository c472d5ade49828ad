"""Memory and time of one P-EAGLE training step on a long sequence, by number of segments S.

    python benchmarks/long_sequences.py --out benchmarks/results/long_sequences_h200.json
    python benchmarks/long_sequences.py --with-target gpt-oss-20b --out FILE
    python benchmarks/long_sequences.py --with-target gpt-oss-20b --tiny --tokens 96  # a rehearsal

A head for an 8B-class target (Qwen3-8B's sizes), random weights and features: what is measured
does not depend on their values. Beside the partitioned steps stands the plain way, S = 1 with
logits of draft and target for all rows, or the memory at which it failed.

With --with-target the hidden states are those of a target of that shape in the same process: what
`peagle train` costs in all, the target's weights and its pass over the row included.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from step_costs import SHAPES, random_target
from step_costs import head_config as head_config_for
from torch import Tensor, nn

from peagle.data.packing import PackedRow, lay_out
from peagle.files import write_json
from peagle.kernels.cpu.linear import unpacked
from peagle.models.eagle import EagleNetwork, SharedTables, shared_tables
from peagle.models.head_config import HeadConfig
from peagle.models.target import TargetModel
from peagle.provenance import provenance
from peagle.teacher_forcing.attention import attention_for
from peagle.teacher_forcing.draft_model import DraftModel, segment_hidden
from peagle.teacher_forcing.features import (
    Features,
    FeatureSource,
    Fetched,
    OnlineFeatures,
    StoredStates,
)
from peagle.teacher_forcing.partition import Shapes
from peagle.train.cod import retentions
from peagle.train.losses import ChunkedLoss
from peagle.train.memory import fixed_bytes, row_bytes
from peagle.train.optimizer import build_optimizer
from peagle.train.planner import PEaglePlanner, PlannedRow
from peagle.train.recipe import OptimizerSection
from peagle.train.setup import compile_layers
from peagle.train.trainer import Trainer

PROMPT_SHARE = 0.02  # of the sequence; reasoning answers are long, their prompts are not
GIB = 2**30


class RandomFeatures:
    """States of a target that is not there."""

    def __init__(self, num_tokens: int, aux_hidden_states: int, size: int, like: Tensor) -> None:
        self.aux_hidden_states = torch.randn(
            num_tokens, aux_hidden_states * size, device=like.device, dtype=like.dtype
        )
        self.states = torch.randn(num_tokens, size, device=like.device, dtype=like.dtype)

    def fetch(self, row: PackedRow) -> StoredStates | None:
        return None

    def __call__(self, row: PackedRow, fetched: Fetched = None) -> Features:
        tokens = row.token_ids.to(self.aux_hidden_states.device)
        return Features(tokens.roll(-1), self.aux_hidden_states, self.states)


def head_config(args: argparse.Namespace) -> HeadConfig:
    return HeadConfig(
        method="p-eagle",
        target_model="random weights, 8B-class",
        target_hidden_size=args.hidden,
        target_num_hidden_layers=36,
        vocab_size=args.vocab,
        aux_hidden_state_layer_ids=(2, 18, 33),
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=4,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads // 4,
        head_dim=args.hidden // args.heads,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        draft_vocab_size=args.vocab,
        max_speculative_tokens=args.depths,
        num_speculative_tokens=args.depths,
    )


def random_tables(config: HeadConfig, device: torch.device, dtype: torch.dtype) -> SharedTables:
    with torch.device(device):
        shared = SharedTables(
            nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype),
            nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype),
        )
    for table in shared:
        table.requires_grad_(False)
        nn.init.normal_(table.weight, std=0.02)
    return shared


def build_network(config: HeadConfig, shared: SharedTables, device: torch.device) -> EagleNetwork:
    with torch.device(device):
        network = EagleNetwork(config, shared).to(device)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    nn.init.normal_(network.mask_hidden, std=0.02)
    return network


def long_row(num_tokens: int, vocab: int) -> PackedRow:
    tokens = torch.randint(0, vocab, (num_tokens,), dtype=torch.int32)
    mask = torch.arange(num_tokens) >= int(PROMPT_SHARE * num_tokens)
    return lay_out([tokens], [mask], [0], num_tokens)


def draw(args: argparse.Namespace, row: PackedRow, num_segments: int) -> PlannedRow:
    """The same elements for every S: COD is drawn from one seed."""
    shapes = Shapes(row_multiple=args.row_multiple, loss_row_multiple=args.chunk_rows)
    planner = PEaglePlanner(
        retentions(args.depths, args.retention, 0.0),
        torch.ones(args.depths),
        num_segments=num_segments,
        shapes=shapes,
    )
    return planner(row, torch.Generator().manual_seed(0))


def measured(work: Callable[[], None], device: torch.device, repeats: int) -> dict[str, Any]:
    """Seconds of one call after a first that compiles, and the peak memory of the later ones."""
    work()
    synchronise(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.monotonic()
    for _ in range(repeats):
        work()
    synchronise(device)
    peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
    return {"seconds_per_step": (time.monotonic() - began) / repeats, "peak_memory_gib": peak}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def partitioned(args: argparse.Namespace, trainer: Trainer, planned: PlannedRow) -> dict[str, Any]:
    device = trainer.device
    result = measured(lambda: trainer.step([planned], 0.0), device, args.repeats)
    segments = [s.to(device) for s in planned.segments]

    def masks() -> None:
        for segment in segments:
            attention_for(segment.elements, segment.positions)

    mask_seconds = measured(masks, device, args.repeats)["seconds_per_step"]
    return result | {
        "segments": len(segments),
        "largest_segment_rows": max(len(s.positions) for s in segments),
        "mask_share": mask_seconds / result["seconds_per_step"],
    }


def plain_step(trainer: Trainer, planned: PlannedRow) -> None:
    """S = 1, logits of draft and target for every row, context and padding included."""
    segment = planned.segments[0].to(trainer.device)
    features = trainer.source(planned.row, None)
    network = trainer.model.network
    with trainer.autocast():
        hidden = segment_hidden(network, segment, features)
        draft = F.linear(network.norm(hidden), unpacked(network.output_weight()))
    slots = torch.zeros(len(segment.positions), dtype=torch.long, device=trainer.device)
    slots[segment.rows] = segment.slots
    with torch.no_grad():
        target = F.linear(features.states[slots], trainer.target_table)
    weights = torch.zeros(len(slots), device=trainer.device)
    weights[segment.rows] = segment.weights.float()
    p = target.float().softmax(-1)
    log_q = draft.float().log_softmax(-1)
    loss = -((p * log_q).sum(-1) * weights).sum() / planned.weight
    loss.backward()  # type: ignore[no-untyped-call]
    trainer.optimizer.zero_grad(set_to_none=True)


def attempted(work: Callable[[], dict[str, Any]], trainer: Trainer) -> dict[str, Any]:
    try:
        return work()
    except torch.OutOfMemoryError as error:
        trainer.optimizer.zero_grad(set_to_none=True)
        return {"out_of_memory": str(error).splitlines()[0]}


def estimate(network: EagleNetwork, rows: int, tokens: int, args: argparse.Namespace) -> float:
    """What `partitions: auto` believes, in GiB, beside the target's layers."""
    compiled = torch.cuda.is_available()
    fixed = fixed_bytes(network, tokens, args.chunk_rows, 2, compiled=compiled)
    per_row = row_bytes(network.config, 2, activation_checkpointing=False, compiled=compiled)
    return (fixed + rows * per_row) / GIB


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target: TargetModel | None = None
    if args.with_target:
        target = random_target(device, SHAPES[args.with_target], dtype, tiny=args.tiny)
        depths = {"max_speculative_tokens": args.depths, "num_speculative_tokens": args.depths}
        config = dataclasses.replace(head_config_for(target, "p-eagle", 4), **depths)
        shared = shared_tables(target)
    else:
        config = head_config(args)
        shared = random_tables(config, device, dtype)
    network = build_network(config, shared, device)
    compiled = device.type == "cuda"
    if compiled:
        torch._dynamo.config.recompile_limit = 64  # one compilation per segment size
        compile_layers(target, network)
    table, elements = [], 0
    for tokens in args.tokens:
        source: FeatureSource
        if target is None:
            source = RandomFeatures(tokens, 3, config.hidden_size, shared.lm_head.weight)
        else:
            source = OnlineFeatures(target, config.aux_hidden_state_layer_ids)
        trainer = make_trainer(args, network, source, dtype if compiled else None)
        row = long_row(tokens, config.vocab_size)
        for entry in steps_of(args, trainer, row):
            table.append(entry)
            report(entry)
        elements = int(sum((s.weights > 0).sum() for s in draw(args, row, 1).segments))
    return {
        "table": table,
        "parameters": sum(p.numel() for p in network.parameters()),
        "target_gib": sum(p.nbytes for p in target.parameters()) / GIB if target else None,
        "elements": elements,  # of the last row
    }


def make_trainer(
    args: argparse.Namespace,
    network: EagleNetwork,
    source: FeatureSource,
    dtype: torch.dtype | None,
) -> Trainer:
    model = DraftModel(network)
    return Trainer(
        model,
        model,
        source,
        network.shared.lm_head.weight,
        ChunkedLoss("kl", args.chunk_rows, compiled=dtype is not None),
        build_optimizer(network, OptimizerSection()),
        max_grad_norm=1.0,
        dtype=dtype,
    )


def steps_of(
    args: argparse.Namespace, trainer: Trainer, row: PackedRow
) -> Iterator[dict[str, Any]]:
    """One entry for each S; without a target, the plain way behind them."""
    tokens, network = len(row.token_ids), trainer.model.network
    for num_segments in args.segments:
        planned = draw(args, row, num_segments)
        entry: dict[str, Any] = {"tokens": tokens, "S": num_segments}
        entry |= attempted(partial(partitioned, args, trainer, planned), trainer)
        if "seconds_per_step" in entry:
            entry["tokens_per_second"] = tokens / entry["seconds_per_step"]
            largest = entry["largest_segment_rows"]
            entry["estimated_gib"] = estimate(network, largest, tokens, args)
        yield entry
        free(trainer.device)
    if not args.with_target:
        work = partial(plain_step, trainer, draw(args, row, 1))
        found = attempted(partial(measured, work, trainer.device, args.repeats), trainer)
        yield {"tokens": tokens, "S": "plain"} | found


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def report(entry: dict[str, Any]) -> None:
    print(json.dumps(entry), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--with-target", choices=SHAPES, help="hidden states from such a target")
    parser.add_argument("--tiny", action="store_true", help="few small layers of the target")
    parser.add_argument("--tokens", type=int, nargs="+", help="20480; with a target also 4096")
    parser.add_argument("--depths", type=int, default=8, help="K")
    parser.add_argument("--retention", type=float, default=0.8, help="r")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--chunk-rows", type=int, default=4096)
    parser.add_argument("--row-multiple", type=int, default=2048)
    parser.add_argument("--segments", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.tokens = args.tokens or ([4096, 20480] if args.with_target else [20480])
    workload = {k: v for k, v in vars(args).items() if k != "out"}
    workload["tokens"] = args.tokens if len(args.tokens) > 1 else args.tokens[0]
    result = run(args) | {"workload": workload, "provenance": provenance(probe_torch=True)}
    if args.out:
        write_json(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
