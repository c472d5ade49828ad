"""Do rows keep their bits beside others, and at what cost? Random layers, on a GPU.

    python benchmarks/batch_invariance.py [--sweep] [--out FILE]

Three questions, each answered as far as it gets: an error is printed and the next one asked.

bits      under the batch-invariant policy, a sequence's rows one at a time against the same rows as
          drafts, among 2 to 1,024 rows of others, and inside a prompt, at contexts up to 2,040
costs     a stack's time under both policies, as a CUDA graph, and that of choosing tokens
mma       whether the tensor cores' two instructions round alike: the products rely on it

`--sweep` also times other tiles of the batch-invariant products. `--tiny` rehearses on a CPU, under
TRITON_INTERPRET=1. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.files import write_json
from peagle.kernels.gpu import linear
from peagle.kernels.gpu.attention import batch_invariant_splits, choose_splits
from peagle.kernels.gpu.best_token import best_tokens
from peagle.kernels.gpu.layers import run_layers
from peagle.kernels.gpu.linear import LinearTile, batch_invariant_tile, invariant_logits
from peagle.kernels.gpu.norms import rms_norm
from peagle.kernels.gpu.sampling import sample_tokens
from peagle.kernels.layer_tensors import LayerTensors, Projection
from peagle.kernels.policy import BATCH_INVARIANT, FAST, Policy
from peagle.kernels.rows import PagedRows, RowGroups
from peagle.provenance import provenance

EPS, THETA = 1e-5, 10_000.0
BLOCK, POSITIONS = 16, 2048
CONTEXTS = (1, 60, 300, 1000, 2040)
DRAFTED = 8  # rows of one request: the newest token and seven drafts
ROWS = (2, 8, 9, 16, 33, 128, 256, 1024)
TIMED_ROWS = (1, 8, 64, 256, 1024)
TIMED_CONTEXT = 300
REPLAYS, IN_A_ROW = 20, 5


class Sizes(NamedTuple):
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    layers: int


MODELS = {
    "smollm2-135m": Sizes(576, 1536, 9, 3, 64, 49_152, 30),
    "8b, one layer": Sizes(4096, 14_336, 32, 8, 128, 128_256, 1),
}
TINY = {"tiny": Sizes(32, 48, 4, 2, 16, 50, 1)}
Item = tuple[int, int, int]  # sequence (0: the one that is looked at), first position, real rows


class Stack:
    """Random layers over a cache of two sequences: the one that is looked at, and one that all
    others read. What others compute is thrown away."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        torch.manual_seed(0)
        self.sizes, self.device = sizes, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        self.layers = [self._layer() for _ in range(sizes.layers)]
        self.norm = self._draw(sizes.hidden, scale=0.1) + 1
        self.table = self._draw(sizes.vocab, sizes.hidden, scale=sizes.hidden**-0.5)
        self.inputs = self._draw(4096, sizes.hidden)  # in place of embeddings
        steps = torch.arange(POSITIONS, device=device, dtype=torch.float32)
        powers = THETA ** -torch.arange(0, 1, 2 / sizes.dim, device=device)
        angles = torch.outer(steps, powers)
        self.cos = torch.cat((angles.cos(), angles.cos()), 1)
        self.sin = torch.cat((-angles.sin(), angles.sin()), 1)
        slots = 2 * POSITIONS + 1
        self.cache = self._draw(2, sizes.layers, slots, sizes.kv_heads, sizes.dim)

    def _draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)

    def _layer(self) -> LayerTensors:
        s = self.sizes

        def projection(outputs: int, inputs: int) -> Projection:
            return Projection(self._draw(outputs, inputs, scale=inputs**-0.5), None)

        return LayerTensors(
            input_norm=self._draw(s.hidden, scale=0.1) + 1,
            post_norm=self._draw(s.hidden, scale=0.1) + 1,
            q_norm=None,
            k_norm=None,
            qkv=projection((s.heads + 2 * s.kv_heads) * s.dim, s.hidden),
            o=projection(s.hidden, s.heads * s.dim),
            gate_up=projection(2 * s.inner, s.hidden),
            down=projection(s.hidden, s.inner),
            window=None,
            eps=EPS,
        )

    def rows(self, items: Sequence[Item], width: int, num_splits: int) -> PagedRows:
        sequences, starts, counts = (torch.tensor(c) for c in zip(*items, strict=True))
        is_own = (sequences == 0)[:, None]
        offsets = torch.arange(width)
        positions = (starts[:, None] + offsets).clamp(max=POSITIONS - 1)
        padding = 2 * POSITIONS
        slots = torch.where(is_own & (offsets < counts[:, None]), positions, padding)
        blocks = torch.arange(2 * POSITIONS // BLOCK).view(2, -1)
        return PagedRows(
            block_tables=blocks.int().to(self.device),
            tables=sequences.clamp(max=1).int().to(self.device),
            starts=starts.int().to(self.device),
            ends=(starts + counts).int().to(self.device),
            positions=positions.flatten().to(self.device),
            slots=slots.flatten().to(self.device),
            rows_per_item=width,
            block_size=BLOCK,
            num_splits=num_splits,
        )

    def embed(self, items: Sequence[Item], width: int) -> Tensor:
        sequences, starts, _ = (torch.tensor(c) for c in zip(*items, strict=True))
        ids = sequences[:, None] * 7919 + (starts[:, None] + torch.arange(width)) * 31
        return self.inputs[(ids % len(self.inputs)).flatten().to(self.device)]

    def run(self, x: Tensor, rows: PagedRows, cache: Tensor, policy: Policy) -> Tensor:
        groups = RowGroups(rows.positions, rows.slots, [rows])
        rows_by_layer = [groups] * len(self.layers)
        keys, values = cache[0].unbind(), cache[1].unbind()
        states = run_layers(
            self.layers, x, None, self.cos, self.sin, rows_by_layer, keys, values, policy
        )
        return rms_norm(states[-1], self.norm, EPS)

    def splits(self, num_items: int, context: int, policy: Policy) -> int:
        s, bucket = self.sizes, 1 << (context - 1).bit_length()
        sms = 132
        if policy.batch_invariant:
            return batch_invariant_splits(num_items, s.kv_heads, s.dim, bucket, sms)
        return choose_splits(num_items, s.kv_heads, bucket, sms)


# --- bits


class Serving(NamedTuple):
    name: str
    items: list[Item]
    width: int
    num_splits: int


def others(count: int, rows: int, seed: int) -> list[Item]:
    draws = torch.Generator().manual_seed(seed)
    starts = torch.randint(1, POSITIONS - 16, (count,), generator=draws).tolist()
    return [(1 + n, start, rows) for n, start in enumerate(starts)]


def servings(context: int, row_counts: Sequence[int]) -> list[Serving]:
    """The rows from `context` on among others: the looked-at item stands anywhere."""
    every_part, found = POSITIONS // 64, []
    for rows in row_counts:
        width = DRAFTED if rows % DRAFTED == 0 else 1
        company = others(rows // width - 1, width, seed=rows)
        company.insert(rows % (len(company) + 1), (0, context, width))
        found.append(Serving(f"{rows} rows", company, width, 1 if rows > 128 else every_part))
    prompt = [*others(max(max(row_counts) // 16 - 1, 0), 16, seed=1), (0, context, DRAFTED)]
    return [*found, Serving(f"{max(row_counts)} rows of prompts", prompt, 16, 1)]


def check_bits(stack: Stack, contexts: Sequence[int], row_counts: Sequence[int]) -> dict[str, Any]:
    """-> how many servings were compared, and those that differ."""
    compared, wrong = 0, []
    for context in contexts:
        cache, parts = stack.cache.clone(), POSITIONS // 64
        expected = []
        for n in range(DRAFTED):
            item = [(0, context + n, 1)]
            splits = (parts, 1)[n % 2]
            rows = stack.rows(item, 1, splits)
            expected.append(stack.run(stack.embed(item, 1), rows, cache, BATCH_INVARIANT))
        alone = torch.cat(expected)
        logits = torch.cat([invariant_logits(row, stack.table) for row in expected])
        tokens = torch.cat([best_tokens(row, stack.table, None).token_ids for row in expected])
        if not torch.equal(tokens, logits.argmax(1)):
            wrong.append(f"context {context}: best tokens are not those of the logits")
        for serving in servings(context, row_counts):
            cache = stack.cache.clone()
            rows = stack.rows(serving.items, serving.width, serving.num_splits)
            x = stack.embed(serving.items, serving.width)
            hidden = stack.run(x, rows, cache, BATCH_INVARIANT)
            at = [item[0] for item in serving.items].index(0) * serving.width
            real = min(serving.width, DRAFTED)
            own = slice(at, at + real)
            same = {
                "hidden": torch.equal(hidden[own], alone[:real]),
                "logits": torch.equal(invariant_logits(hidden, stack.table)[own], logits[:real]),
                "tokens": torch.equal(
                    best_tokens(hidden, stack.table, None).token_ids[own], tokens[:real]
                ),
            }
            compared += 1
            names = [name for name, is_same in same.items() if not is_same]
            if names:
                differ = int((hidden[own] != alone[:real]).sum())
                wrong.append(f"context {context}, {serving.name}: {names}, {differ} numbers")
    return {"compared": compared, "differ": wrong}


# --- costs


def timed_items(rows: int) -> tuple[list[Item], int]:
    width = 1 if rows < DRAFTED else DRAFTED if rows <= 256 else 16
    return [(1, TIMED_CONTEXT, width)] * (rows // width), width


def microseconds(step: Callable[[], Any], device: torch.device) -> float:
    """The median of replays, each several in a row."""
    if device.type != "cuda":
        before = time.perf_counter()
        step()
        return 1e6 * (time.perf_counter() - before)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        begun: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begun.record()
        for _ in range(IN_A_ROW):
            graph.replay()
        ended.record()
        ended.synchronize()
        times.append(1000 * begun.elapsed_time(ended) / IN_A_ROW)
    return statistics.median(times)


def choose(stack: Stack, hidden: Tensor, policy: Policy) -> Tensor:
    if policy.greedy_without_logits(hidden):
        return best_tokens(hidden, stack.table, None).token_ids
    if hidden.is_cuda:
        logits = torch.mm(hidden, stack.table.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ stack.table.float().t()
    return sample_tokens(logits, None, None).token_ids


def steps(stack: Stack, rows: int, policy: Policy) -> tuple[Callable[[], Tensor], ...]:
    items, width = timed_items(rows)
    splits = 1 if width == 16 else stack.splits(len(items), TIMED_CONTEXT + DRAFTED, policy)
    plan, x = stack.rows(items, width, splits), stack.embed(items, width)
    hidden = stack.run(x, plan, stack.cache, policy)
    return (
        lambda: stack.run(x, plan, stack.cache, policy),
        lambda: choose(stack, hidden, policy),
    )


def time_costs(stack: Stack, row_counts: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for rows in row_counts:
        cost: dict[str, Any] = {"rows": rows}
        for name, policy in (("fast", FAST), ("invariant", BATCH_INVARIANT)):
            layers, chosen = steps(stack, rows, policy)
            once, again = microseconds(layers, stack.device), microseconds(layers, stack.device)
            cost[f"{name}_layer_us"] = min(once, again) / len(stack.layers)
            cost[f"{name}_spread"] = abs(once - again) / min(once, again)
            cost[f"{name}_choose_us"] = microseconds(chosen, stack.device)
        whole = {
            name: cost[f"{name}_layer_us"] * len(stack.layers) + cost[f"{name}_choose_us"]
            for name in ("fast", "invariant")
        }
        cost["ratio"] = whole["invariant"] / whole["fast"]
        found.append(cost)
        print(
            f"  {rows:5} rows  layer {cost['fast_layer_us']:8.1f} -> "
            f"{cost['invariant_layer_us']:8.1f} us   choose {cost['fast_choose_us']:7.1f} -> "
            f"{cost['invariant_choose_us']:7.1f} us   all {cost['ratio']:.3f}x",
            flush=True,
        )
    return found


# --- the two instructions


def compare_instructions(device: torch.device) -> dict[str, int]:
    """How many float32 sums differ between mma.sync (32 rows in a tile) and wgmma (64)."""
    found = {}
    for name, spread in (("normal", 0.0), ("of many magnitudes", 3.0)):
        torch.manual_seed(1)
        draws = [torch.randn(2, n, 2048, device=device) for n in (64, 1024)]
        x, weight = ((base * torch.exp(spread * size)).bfloat16() for base, size in draws)
        sums = [
            linear._product(
                x, weight, None, None, None, None, False, torch.float32,
                LinearTile(rows, 64, 64, warps=4, stages=3),
            )
            for rows in (32, 64)
        ]  # fmt: skip
        found[name] = int((sums[0] != sums[1]).sum())
    return found


# --- other tiles


def candidates(block: LinearTile) -> list[LinearTile]:
    """Each with one chain of sums."""
    if block.rows >= 64:
        forms = [(64, 32, 4, 5), (64, 64, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3), (128, 64, 8, 4)]
    else:
        forms = [(16, 16, 2, 4), (16, 32, 4, 4), (32, 16, 2, 4), (32, 32, 2, 4), (32, 32, 4, 3)]
        forms += [(32, 64, 4, 3), (32, 64, 8, 3), (32, 128, 8, 3)]
    return [
        block,
        *(block._replace(rows=r, outputs=o, warps=w, stages=s) for r, o, w, s in forms),
    ]


def sweep(stack: Stack, row_counts: Sequence[int]) -> dict[str, dict[str, float]]:
    layer, found = stack.layers[0], {}
    for rows in row_counts:
        for name in ("qkv", "o", "gate_up", "down"):
            weight, gated = getattr(layer, name).weight, name == "gate_up"
            outputs, inputs = weight.shape
            x = stack._draw(rows, weight.shape[1])
            times = {}
            for block in candidates(batch_invariant_tile(rows, outputs, inputs, gated, 2)):
                arguments = (x, weight, None, None, None, None, gated, x.dtype, block)

                def step(arguments: tuple[Any, ...] = arguments) -> None:
                    for _ in range(10):
                        linear._product(*arguments)

                try:
                    times[str(tuple(block))] = microseconds(step, stack.device) / 10
                except Exception as error:
                    times[f"{tuple(block)}: {type(error).__name__}"] = float("inf")
            found[f"{rows} rows, {name}"] = times
            best = sorted(times.items(), key=lambda pair: pair[1])[:3]
            chosen = next(iter(times.values()))
            print(f"  {rows:5} rows {name:8} chosen {chosen:7.2f} us, best {best}", flush=True)
    return found


# --- the script


def warm_up(name: str, rows: int) -> None:
    """Compiles, in a process of its own, what the rest will find in Triton's cache."""
    device = torch.device("cuda")
    stack = Stack(MODELS[name]._replace(layers=1), device)
    with torch.inference_mode():
        check_bits(stack, (1,), [rows])
        for policy in (FAST, BATCH_INVARIANT):
            if rows in TIMED_ROWS:
                layers, chosen = steps(stack, rows, policy)
                layers(), chosen()


def compile_ahead() -> None:
    jobs = [(name, rows) for name in MODELS for rows in sorted({*ROWS, *TIMED_ROWS})]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(8, mp_context=context) as pool:
        for job, future in [(job, pool.submit(warm_up, *job)) for job in jobs]:
            if error := future.exception():
                print(f"  {job}: {type(error).__name__}: {error}", flush=True)


def answer(name: str, ask: Callable[[], Any]) -> Any:
    """What `ask` finds, or what went wrong: the other questions are still asked."""
    begun = time.perf_counter()
    print(name, flush=True)
    try:
        found = ask()
    except Exception as error:
        traceback.print_exc(limit=-3)
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(f"  ({time.perf_counter() - begun:.1f} s)", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    models: dict[str, Sizes] = TINY if args.tiny else MODELS
    contexts: Sequence[int] = CONTEXTS[1:2] if args.tiny else CONTEXTS
    row_counts: Sequence[int] = (2, 8, 16) if args.tiny else ROWS
    timed: Sequence[int] = (1, 16) if args.tiny else TIMED_ROWS
    if not args.tiny:
        answer("compiling", compile_ahead)
    document: dict[str, Any] = {}
    with torch.inference_mode():
        for name, sizes in models.items():
            stack = Stack(sizes, device)
            found = document[name] = {}
            ask = {
                "bits": lambda s=stack: check_bits(s, contexts, row_counts),
                "costs": lambda s=stack: time_costs(s, timed),
            }
            if args.sweep:
                ask["sweep"] = lambda s=stack: sweep(s, timed)
            for question, question_of in ask.items():
                found[question] = answer(f"{name}: {question}", question_of)
                if question == "bits":
                    print(f"  {found[question]}", flush=True)
            del stack
        if not args.tiny:
            found = answer("mma", lambda: compare_instructions(device))
            document["mma.sync and wgmma: sums that differ"] = found
            print(f"  {found}", flush=True)
    document["provenance"] = provenance(probe_torch=True)
    if args.out:
        write_json(args.out, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
