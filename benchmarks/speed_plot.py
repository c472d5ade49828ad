"""The plot at the top of README.md, drawn from two result files as SVG, for light and dark pages.

    python benchmarks/speed_plot.py

Left: gain over plain decoding by streams on an H200, all methods from one run. Right: tokens per
second of this engine and of vLLM on a CPU, from one run. A test compares the committed images with
what this script would write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from results_page import (
    CHAINS,
    EAGLE3,
    H200,
    PLAIN,
    ROOT,
    TREES,
    Kind,
    bench_report,
    best_speeds,
    drafters,
    result,
)

IMAGES = ROOT / "docs/images"
WORKLOAD = "humaneval"
WIDTH, HEIGHT = 860, 330
TOP, BASE = 92, 270  # of the bars


class Theme(NamedTuple):
    text: str
    muted: str
    lines: str
    plain: str
    eagle3: str
    chains: str
    trees: str

    def colour(self, kind: Kind) -> str:
        colours = (self.plain, self.eagle3, self.chains, self.trees)
        return dict(zip(KINDS, colours, strict=True))[kind]


KINDS = PLAIN, EAGLE3, CHAINS, TREES


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d1d9e0", "#afb8c1", "#6ba6e8", "#d4561f", "#8f3410"),
    "dark": Theme("#f0f6fc", "#9198a1", "#3d444d", "#656c76", "#4f8fd6", "#f0793c", "#f9b58c"),
}


class Bar(NamedTuple):
    kind: Kind
    value: float
    text: str


class Group(NamedTuple):
    name: str
    bars: Sequence[Bar]


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, drawing in images().items():
        (IMAGES / name).write_text(drawing, encoding="utf-8")


def images() -> dict[str, str]:
    return {f"speed-{name}.svg": drawn(theme) for name, theme in THEMES.items()}


def drawn(theme: Theme) -> str:
    parts = [
        *panel(theme, gpu_gains(), 20, 500, "Gain over plain decoding, by streams", GPU_NOTE),
        *panel(theme, cpu_speeds(), 560, 280, "Tokens per second, one request", cpu_note()),
        *legend(theme),
    ]
    style = "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    label = "P-EAGLE, EAGLE-3 and plain decoding on a GPU; this engine and vLLM on a CPU"
    return f'{head} aria-label="{label}" style="{style}">\n' + "\n".join(parts) + "\n</svg>\n"


GPU_NOTE = "SmolLM2-135M on one H200, bfloat16, HumanEval, best setting of each method"


def cpu_note() -> str:
    workload = result("engine_vs_vllm_cpu")["workload"]
    return f"SmolLM2-135M on 2 CPU cores, float32, K = {workload['num_speculative_tokens']}"


def gpu_gains() -> list[Group]:
    report = bench_report(H200)
    speeds = {kind: best_speeds(report, WORKLOAD, kind) for kind in gpu_kinds()}
    groups = []
    for streams, plain in speeds[PLAIN].items():
        gains = {k: s[streams].otps / plain.otps for k, s in speeds.items() if streams in s}
        bars = [Bar(kind, gain, f"{gain:.2f}x") for kind, gain in gains.items()]
        groups.append(Group(f"{streams}", bars))
    return groups


def gpu_kinds() -> list[Kind]:
    """Those that were measured, in the order of their bars."""
    found = drafters(bench_report(H200))
    return [kind for kind in KINDS if kind is PLAIN or kind in found]


def cpu_speeds() -> list[Group]:
    found = result("engine_vs_vllm_cpu")
    version = ".".join(found["vllm_environment"]["vllm-cpu"].split(".")[:2])
    groups = []
    for key, name in (("vllm", f"vLLM {version}"), ("embedded", "peagle")):
        speeds = {k: found["tokens_per_second"][f"{key} {w}"] for k, w in CPU_KINDS.items()}
        groups.append(Group(name, [Bar(k, speed, f"{speed:.0f}") for k, speed in speeds.items()]))
    return groups


CPU_KINDS = {PLAIN: "plain", CHAINS: "p-eagle"}


def panel(
    theme: Theme, groups: Sequence[Group], left: int, width: int, title: str, note: str
) -> Iterable[str]:
    yield text(left, 24, title, theme.text, size=15, weight=600)
    yield text(left, 44, note, theme.muted, size=12)
    highest = max(bar.value for group in groups for bar in group.bars)
    step = width / len(groups)
    for number, group in enumerate(groups):
        middle = left + step * (number + 0.5)
        yield from bars(theme, group, middle, 0.88 * step / len(group.bars), highest)
        yield text(middle, BASE + 20, group.name, theme.text, size=13, anchor="middle")
    yield f'<path d="M{left} {BASE}.5H{left + width}" stroke="{theme.lines}"/>'


def bars(theme: Theme, group: Group, middle: float, size: float, highest: float) -> Iterable[str]:
    first = middle - size * len(group.bars) / 2
    for number, bar in enumerate(group.bars):
        x, height = first + number * size + 2, (BASE - TOP) * bar.value / highest
        y, colour = BASE - height, theme.colour(bar.kind)
        place = f'x="{x:.1f}" y="{y:.1f}" width="{size - 4:.1f}" height="{height:.1f}"'
        yield f'<rect {place} fill="{colour}"/>'
        centre = x + (size - 4) / 2
        yield text(centre, y - 6, bar.text, theme.text, size=11, anchor="middle")


def legend(theme: Theme) -> Iterable[str]:
    left = 20
    for kind in gpu_kinds():
        yield f'<rect x="{left}" y="307" width="12" height="12" fill="{theme.colour(kind)}"/>'
        yield text(left + 18, 318, kind.name, theme.text, size=13)
        left += 100


def text(
    x: float,
    y: float,
    words: str,
    colour: str,
    *,
    size: int,
    weight: int = 400,
    anchor: str = "start",
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


if __name__ == "__main__":
    main()
