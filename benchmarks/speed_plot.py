"""The picture at the top of README.md, drawn from result files as SVG, for light and dark pages.

    python benchmarks/speed_plot.py

Top: the beginning of a real answer, a box for each forward pass of the target. Below: gain over
plain decoding by streams on a GPU, all methods from one run, and tokens per second of this engine
and of vLLM on a CPU, from one run. A test compares the committed images with what this script would
write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from results_page import (
    CHAINS,
    CPU,
    EAGLE3,
    H200,
    PLAIN,
    ROOT,
    WORKLOADS,
    Json,
    Kind,
    bench_report,
    best_of_p_eagle,
    best_speeds,
    gained,
    result,
)

from peagle.bench.results.figures import counted, factor, quantity

IMAGES = ROOT / "docs/images"
WORKLOAD = "humaneval"
MODELS = {"smollm2-135m": "SmolLM2-135M"}
WIDTH, HEIGHT, LEFT = 860, 474, 20
STRIPS = 88  # the first row of boxes
BOX, LETTER, EDGE, GAP = 24, 6.62, 4, 3  # height; width of a letter; space inside and between
LABELS, COUNTS = 98, 84  # width of the words before and behind the boxes
TOP, BASE = 236, 404  # of the bars


class Theme(NamedTuple):
    text: str
    muted: str
    lines: str
    plain: str
    eagle3: str
    p_eagle: str

    def colour(self, kind: Kind) -> str:
        colours = (self.plain, self.eagle3, self.p_eagle)
        return dict(zip(KINDS, colours, strict=True))[kind]


KINDS = PLAIN, EAGLE3, CHAINS  # CHAINS: P-EAGLE, whatever drafts are fastest


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d1d9e0", "#afb8c1", "#6ba6e8", "#d4561f"),
    "dark": Theme("#f0f6fc", "#9198a1", "#3d444d", "#656c76", "#4f8fd6", "#f0793c"),
}


class Bar(NamedTuple):
    kind: Kind
    value: float
    text: str


class Group(NamedTuple):
    name: str
    bars: Sequence[Bar]


class Answer(NamedTuple):
    """One answer, plain and with drafts, as far as both say the same."""

    plain: list[str]  # a text for each forward pass of the target
    drafted: list[str]


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, drawing in images().items():
        (IMAGES / name).write_text(drawing, encoding="utf-8")


def images() -> dict[str, str]:
    return {f"speed-{name}.svg": drawn(theme) for name, theme in THEMES.items()}


def drawn(theme: Theme) -> str:
    note = gpu_note()
    parts = [
        text(LEFT, 32, headline(), theme.text, size=22, weight=700),
        *strips(theme, answer()),
        *panel(theme, gpu_gains(), LEFT, 500, "Speed over plain decoding", note),
        *panel(theme, cpu_speeds(), 560, 280, "Tokens per second, one request", cpu_note()),
        *legend(theme),
    ]
    style = "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    label = escape(f"{headline()}. {note}")
    return f'{head} aria-label="{label}" style="{style}">\n' + "\n".join(parts) + "\n</svg>\n"


def headline() -> str:
    """What the best of all settings gains, at the load where it gains most."""
    most = max(map(gained, best_of_p_eagle(bench_report(H200), WORKLOAD).values()))
    return f"The same tokens in fewer passes: up to {most:.1f} times as fast"


def gpu_note() -> str:
    """Model, workload, hardware and what is compared, as the result file has them."""
    manifest = bench_report(H200)["manifest"]
    model = MODELS.get(manifest["model"], manifest["model"])
    gpu = manifest["provenance"]["hardware"]["gpus"][0].split(",")[0]
    return f"{model} on {WORKLOADS[WORKLOAD]}, one {gpu}, {manifest['dtype']}, best setting of each"


def cpu_note() -> str:
    workload = result("engine_vs_vllm_cpu")["workload"]
    model = MODELS.get(workload["model"], workload["model"])
    cores = f"{workload['threads']} CPU cores"
    return f"{model}, {cores}, {workload['dtype']}, K = {workload['num_speculative_tokens']}"


def answer() -> Answer:
    """The sample on whose tokens plain decoding and P-EAGLE agree longest."""
    samples = bench_report(CPU)["samples"]
    found = []
    for plain in (s for s in samples if s["method"] == "none"):
        for drafted in samples:
            is_p_eagle = drafted["method"].startswith("p-eagle")
            if is_p_eagle and drafted["prompt"] == plain["prompt"]:
                found.append(_agreed(plain["tokens"], drafted["tokens"]))
    return max(found, key=lambda one: len(one.plain), default=Answer([], []))


def _agreed(plain: Sequence[Json], drafted: Sequence[Json]) -> Answer:
    """A pass ends with the target's own token; nothing is drafted before the first one."""
    tokens, passes = [], [""]
    for number, (ours, theirs) in enumerate(zip(plain, drafted, strict=False)):
        if ours["text"] != theirs["text"]:
            break
        tokens.append(ours["text"])
        passes[-1] += theirs["text"]
        if not theirs["drafted"] or number == 0:
            passes.append("")
    return Answer(tokens, [p for p in passes if p])


def strips(theme: Theme, shown: Answer) -> Iterable[str]:
    """Both rows begin with the same text; each goes on as far as there is room. None without a
    sample."""
    if not shown.plain:
        return
    size = counted(len(shown.plain), "token")
    note = f"The first {size} of an answer, a box for each forward pass of the target"
    yield text(LEFT, 60, note, theme.muted, size=13)
    for number, (kind, passes) in enumerate(((PLAIN, shown.plain), (CHAINS, shown.drafted))):
        top = STRIPS - 10 + number * (BOX + 12)
        yield text(LEFT, top + 17, kind.name, theme.text, size=13, weight=600)
        yield from boxes(theme, kind, passes, top)
        words = f"{len(passes)} passes"
        yield text(WIDTH - LEFT, top + 17, words, theme.text, size=14, weight=700, anchor="end")


def boxes(theme: Theme, kind: Kind, passes: Sequence[str], top: float) -> Iterable[str]:
    x, end = float(LEFT + LABELS), WIDTH - LEFT - COUNTS - 20
    for words in map(visible, passes):
        size = 2 * EDGE + LETTER * len(words)
        if x + size > end:
            yield text(x + 2, top + 17, "...", theme.muted, size=13)
            return
        place = f'x="{x:.1f}" y="{top}" width="{size:.1f}" height="{BOX}" rx="3"'
        yield f'<rect {place} fill="{theme.colour(kind)}" fill-opacity=".38"/>'
        style = f'font-size="11" font-family="{MONOSPACED}" fill="{theme.text}"'
        length = f'textLength="{LETTER * len(words):.1f}" lengthAdjust="spacingAndGlyphs"'
        yield f'<text x="{x + EDGE:.1f}" y="{top + 16}" {length} {style}>{escape(words)}</text>'
        x += size + GAP


MONOSPACED = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"


def visible(words: str) -> str:
    """Line ends as a sign, and spaces that a drawing keeps."""
    lines = words.replace("\n", "\N{RETURN SYMBOL}")
    return lines.replace(" ", "\N{NO-BREAK SPACE}")


def gpu_gains() -> list[Group]:
    report = bench_report(H200)
    speeds = {kind: best_speeds(report, WORKLOAD, kind) for kind in (PLAIN, EAGLE3)}
    speeds[CHAINS] = best_of_p_eagle(report, WORKLOAD)
    groups = []
    for streams in speeds[PLAIN]:
        found = {kind: own[streams] for kind, own in speeds.items() if streams in own}
        bars = [Bar(kind, gained(speed), factor(speed.gain)) for kind, speed in found.items()]
        groups.append(Group(counted(streams, "stream"), bars))
    return groups


def cpu_speeds() -> list[Group]:
    found = result("engine_vs_vllm_cpu")
    version = ".".join(found["vllm_environment"]["vllm-cpu"].split(".")[:2])
    groups = []
    for key, name in (("vllm", f"vLLM {version}"), ("embedded", "peagle")):
        speeds = {k: found["tokens_per_second"][f"{key} {w}"] for k, w in CPU_KINDS.items()}
        groups.append(Group(name, [Bar(k, speed, quantity(speed)) for k, speed in speeds.items()]))
    return groups


CPU_KINDS = {PLAIN: "plain", CHAINS: "p-eagle"}


def panel(
    theme: Theme, groups: Sequence[Group], left: int, width: int, title: str, note: str
) -> Iterable[str]:
    yield text(left, TOP - 50, title, theme.text, size=15, weight=600)
    yield text(left, TOP - 31, note, theme.muted, size=12)
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
    left = LEFT
    for kind in KINDS:
        y = BASE + 38
        yield f'<rect x="{left}" y="{y}" width="12" height="12" fill="{theme.colour(kind)}"/>'
        yield text(left + 18, y + 11, kind.name, theme.text, size=13)
        left += 110


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
