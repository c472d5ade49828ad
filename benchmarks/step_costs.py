"""What one step costs on a GPU: plain, draft and verify by drafts, concurrency and context.

    python benchmarks/step_costs.py --shape qwen3-8b --out FILE
    python benchmarks/step_costs.py --shape gpt-oss-20b --out FILE
    python benchmarks/step_costs.py --model smollm2-135m --head smollm2-135m-p-eagle ...
    python benchmarks/step_costs.py --shape gpt-oss-20b --tiny --device cpu    # a rehearsal

Weights of a shape are random: a step's time does not depend on their values, while its acceptance
would. A step of P-EAGLE gives as many tokens as the acceptance length, a plain step one: so it pays
off from the acceptance length on that is its time over a plain step's, `pays_off_from`.

Rows have random tokens, so that a router sends them to different experts: `experts_read` is how
many of a layer's experts a verification reads, on average over layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

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
from peagle.models.experts import LowBitMatrices, Router
from peagle.models.head_config import HeadConfig
from peagle.models.p_eagle import PEagleDrafter
from peagle.models.target import TargetModel, default_aux_hidden_state_layers
from peagle.provenance import provenance
from peagle.speculation.budget import MOST_OF_MEAN

WARM_UPS, REPLAYS = 2, 10
HEADROOM = 512  # tokens that replays may add before a request ends


class Shape(NamedTuple):
    """A target's sizes: a config class of transformers, and what differs from its defaults."""

    kind: str
    sizes: dict[str, Any]
    quantization: dict[str, Any] | None = None  # how its experts are stored


QWEN3_8B = Shape(
    "Qwen3Config",
    {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
)
GPT_OSS_20B = Shape(
    "GptOssConfig", {"num_hidden_layers": 24, "num_local_experts": 32}, {"quant_method": "mxfp4"}
)
QWEN3_30B_A3B = Shape(
    "Qwen3MoeConfig",
    {
        "num_hidden_layers": 48,
        "head_dim": 128,
        "norm_topk_prob": True,
        "max_position_embeddings": 40_960,
    },
)
SHAPES = {
    "qwen3-8b": QWEN3_8B,
    "gpt-oss-20b": GPT_OSS_20B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-30b-a3b-fp8": QWEN3_30B_A3B._replace(
        quantization={"quant_method": "fp8", "weight_block_size": [128, 128]}
    ),
}
# For rehearsals: as few and small layers as have every part.
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
}


def decoder(shape: Shape, *, tiny: bool = False) -> DecoderConfig:
    kind = getattr(transformers, shape.kind)
    own = kind().to_dict()
    small = {name: size for name, size in TINY.items() if name in own} if tiny else {}
    config = kind(**shape.sizes | small)
    config.quantization_config = shape.quantization
    return DecoderConfig.from_transformers(config)


def random_target(
    device: torch.device, shape: Shape, dtype: torch.dtype = torch.bfloat16, *, tiny: bool = False
) -> TargetModel:
    with torch.device("meta"):
        target = TargetModel(decoder(shape, tiny=tiny))
    filled: TargetModel = _filled(target, device, dtype)
    return filled


def head_config(target: TargetModel, method: str, layers: int) -> HeadConfig:
    c = target.config
    return HeadConfig(
        method="p-eagle" if method == "p-eagle" else "eagle3",
        target_model="random",
        target_hidden_size=c.hidden_size,
        target_num_hidden_layers=c.num_hidden_layers,
        vocab_size=c.vocab_size,
        aux_hidden_state_layer_ids=default_aux_hidden_state_layers(c.num_hidden_layers),
        hidden_size=c.hidden_size,
        # As wide as the released heads of targets with experts; their MLP is no measure for one.
        intermediate_size=4 * c.hidden_size if c.experts else c.intermediate_size,
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


def random_head(target: TargetModel, method: str, layers: int) -> EagleNetwork:
    with torch.device("meta"):
        network = EagleNetwork(head_config(target, method, layers), shared_tables(target))
    table = target.embed_tokens.weight
    filled: EagleNetwork = _filled(network, table.device, table.dtype)
    filled.target_ids = torch.arange(target.config.vocab_size, device=filled.fc.weight.device)
    return filled


def _filled(module: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Small random weights made on the device itself; tables that were never meta keep theirs.

    Embeddings are large and norms plain, so that rows stay as different as their tokens: what a
    router sends to which expert depends on it."""
    for name, table in list(module.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        made = torch.empty_like(table, device=device) if table.is_meta else table.to(device)
        module.get_submodule(owner)._buffers[leaf] = made
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        if parameter.is_meta:
            scales = isinstance(holder, LowBitMatrices) and leaf == "scales"
            made = _random(parameter, device, dtype, is_scales=scales)
            if owner.endswith("embed_tokens"):
                made.div_(0.02)
            elif "norm" in owner:
                made.fill_(1.0)
            holder._parameters[leaf] = nn.Parameter(made, requires_grad=False)
    return module.requires_grad_(False).eval()


def _random(like: Tensor, device: torch.device, dtype: torch.dtype, *, is_scales: bool) -> Tensor:
    """Of some 0.02, low-bit values together with their scales."""
    if is_scales:
        value = 120 if like.dtype is torch.uint8 else 0.02  # 120: 2 ** -7
        return torch.full(like.shape, value, dtype=like.dtype, device=device)
    if like.dtype is torch.uint8:
        return torch.randint(256, like.shape, dtype=like.dtype, device=device)
    values = torch.empty(like.shape, dtype=dtype, device=device)
    if like.dtype.itemsize == 1:
        return values.normal_().to(like.dtype)
    return values.normal_(0.0, 0.02)


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


class Drafts(NamedTuple):
    depth: int
    nodes: int | None = None  # of a tree, at most
    mean: int | None = None  # of trees that share their rows: how many nodes each has on average

    @property
    def total(self) -> int:
        return self.nodes or self.depth


class Bench:
    """One engine whose slots are put at a context by hand; requests are never asked for."""

    def __init__(
        self, target: TargetModel, drafter: Any, drafts: list[Drafts], args: argparse.Namespace
    ) -> None:
        """`drafts`: chains, or trees; the first is the largest."""
        config = EngineConfig(
            max_model_len=max(args.context) + HEADROOM,
            max_num_seqs=max(args.concurrency),
            max_num_batched_tokens=2048,
        )
        speculation = None
        if drafter is not None:
            depth, nodes = max(own.depth for own in drafts), drafts[0].nodes
            shares = any(own.mean for own in drafts)
            speculation = Speculation(drafter, depth, num_draft_nodes=nodes, is_auto=shares)
        self.engine = Engine(target, config, speculation=speculation, static_shapes=True)
        self.models = models = self.engine.runner.models
        # Nobody writes the context: what memory happens to hold may be NaN, which would end slots.
        paged = [models.model, *([models.drafting.model] if models.drafting else [])]
        for cache in (model.cache for model in paged):
            cache.keys.zero_()
            cache.values.zero_()
        vocab, state = target.config.vocab_size, models.state
        self.tokens = torch.randint_like(state.last_tokens, vocab)
        self.drafts = torch.randint_like(state.drafts, vocab)

    def place(self, batch: int, context: int, drafts: Drafts) -> bool:
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
        state.max_drafts[:batch] = drafts.total
        state.max_depths[:batch] = drafts.depth
        state.num_drafts[:batch] = drafts.total
        state.capacity[:batch] = per_slot * allocator.block_size
        return True

    def step(self, batch: int, drafts: Drafts, context: int) -> Step:
        splits = self.engine.runner.num_splits(batch, context)
        size = padded(batch, BATCH_SIZES)
        shape = StepShape(
            size,
            drafts.depth,
            "greedy",
            num_splits=splits,
            num_nodes=drafts.nodes,
            mean_nodes=drafts.mean,
        )
        step = Step(self.models, shape)
        step.fields.slots[:batch] = torch.arange(batch)
        step.fields.caps.fill_(drafts.total)
        return step

    @torch.inference_mode()
    def costs(self, batch: int, drafts: Drafts, context: int) -> dict[str, float] | None:
        if not self.place(batch, context, drafts):
            return None
        step, state = self.step(batch, drafts, context), self.models.state
        if state.trees is not None:  # as if the root alone had children
            own = torch.arange(state.trees.depths.shape[1], device=state.trees.depths.device)
            state.trees.parents.zero_()
            state.trees.depths.copy_((own > 0).long())
            state.trees.ancestors.copy_(1 | 1 << own)
        if state.draft_scores is not None:
            state.draft_scores.copy_(-torch.rand_like(state.draft_scores).cumsum(1))

        def restart() -> None:
            """A replay must not wander off, nor its tokens become alike."""
            state.num_computed[:batch] = context
            state.last_tokens.copy_(self.tokens)
            state.drafts.copy_(self.drafts)

        def verify() -> Verified:
            restart()
            return step.verify()

        def whole() -> Tensor:
            restart()
            return step()

        costs = {"verify_ms": milliseconds(verify)}
        if drafts.depth:
            verified = verify()
            least = int(verified.committed.num_drafts[:batch].min())
            assert least == drafts.depth, "a slot has ended"
            costs["draft_ms"] = milliseconds(lambda: step.draft(verified))
        costs["step_ms"] = milliseconds(whole)
        return costs | experts_read(self.models.target, verify)


def experts_read(target: TargetModel, verify: Callable[[], object]) -> dict[str, float]:
    """Of a layer, on average; nothing for a target without experts."""
    counts: list[int] = []
    routers = [module for module in target.modules() if isinstance(module, Router)]
    handles = [
        router.register_forward_hook(lambda _, args, out: counts.append(len(out.experts.unique())))
        for router in routers
    ]
    if handles:
        verify()
    for handle in handles:
        handle.remove()
    return {"experts_read": statistics.mean(counts)} if counts else {}


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
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--tiny", action="store_true", help="few small layers: a rehearsal")
    parser.add_argument("--depths", type=int, nargs="+", help="of chains; default 3 5 7 11, or 7")
    parser.add_argument("--nodes", type=int, nargs="*", help="of trees; default 15 31 with experts")
    parser.add_argument("--tree-depth", type=int, default=7)
    parser.add_argument(
        "--shared", type=int, nargs="*", default=[], help="mean nodes of trees that share rows"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", help="default 1 8 32 128, or 1 8 32")
    parser.add_argument("--context", type=int, nargs="+", help="default 1024 8192, or 1024")
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    device = torch.device(args.device)
    target = (
        load_target(resolve_model(args.model), dtype=torch.bfloat16, device=device)
        if args.model
        else random_target(device, SHAPES[args.shape], tiny=args.tiny)
    )
    fill_in(args, has_experts=target.config.experts is not None)
    if args.quantization:
        from peagle.models.fp8 import quantize_linears

        quantize_linears(target)
    rows: list[dict[str, Any]] = []
    plain: dict[tuple[int, int], float] = {}  # milliseconds by concurrency and context
    for method, drafter, every in engines(drafters_for(target, args), args):
        bench = Bench(target, drafter, every, args)
        for context in args.context:
            for batch in args.concurrency:
                for drafts in every:
                    cell: dict[str, Any] = {"method": method, "K": drafts.depth}
                    cell |= {"nodes": drafts.nodes} if drafts.nodes else {}
                    cell |= {"mean_nodes": drafts.mean} if drafts.mean else {}
                    cell |= {"concurrency": batch, "context": context}
                    cell |= bench.costs(batch, drafts, context) or {"does_not_fit": True}
                    if "step_ms" in cell:
                        alone = plain.setdefault((batch, context), cell["step_ms"])
                        cell["pays_off_from"] = cell["step_ms"] / alone
                    rows.append(cell)
                    print(json.dumps(cell), flush=True)
                    write(rows, args)  # an interrupted run keeps what it has
        del bench
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def engines(
    drafters: dict[str, Any], args: argparse.Namespace
) -> list[tuple[str, Any, list[Drafts]]]:
    """Method, drafter and drafts of each; plain decoding first."""
    chains = [Drafts(depth) for depth in args.depths]
    trees = [[Drafts(args.tree_depth, nodes)] for nodes in args.nodes]
    trees += [[Drafts(args.tree_depth, MOST_OF_MEAN * n + 3, n)] for n in args.shared]
    return [
        ("none", None, [Drafts(0)]),
        *((method, drafter, chains) for method, drafter in drafters.items() if chains),
        *(("p-eagle", drafters["p-eagle"], tree) for tree in trees if "p-eagle" in drafters),
    ]


def fill_in(args: argparse.Namespace, *, has_experts: bool) -> None:
    """What nobody gave: a long table for a dense target, one with trees for one with experts."""
    args.depths = args.depths or ([7] if has_experts else [3, 5, 7, 11])
    if args.nodes is None:
        args.nodes = [15, 31] if has_experts else []
    args.concurrency = args.concurrency or ([1, 8, 32] if has_experts else [1, 8, 32, 128])
    args.context = args.context or ([1024] if has_experts else [1024, 8192])


def for_simulate(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as `peagle simulate --costs` reads it: seconds by part of a step."""
    parts = []
    for row in rows:
        if row.get("does_not_fit") or "nodes" in row:
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
