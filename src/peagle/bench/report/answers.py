"""The answers themselves: side by side with drafts shown, where they differ, and which loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from peagle.bench.analysis import series
from peagle.bench.report.markup import details, or_nothing, paragraph, table, text
from peagle.bench.results.document import AnswerDifference, Results, Sample, TreeSample
from peagle.bench.results.figures import NOTHING, counted, length, share
from peagle.bench.results.settings import (
    NONE,
    Setting,
    by_place,
    full_name,
    series_names,
    short_name,
    usable_runs,
)

SHOWN_OPEN = 2  # prompts; the others fold
LABEL = re.compile(r"(?P<method>[^ ]+)(?: N=(?P<nodes>\d+))?(?P<auto> auto)?(?: \((?P<head>.*)\))?")
# What an answer has that is read by columns: a fence, an indented line, or a line that begins so.
CODE = re.compile(r"```|^(?: {4}|\t|def |class |import |from \w+ import |#include|function )", re.M)


def samples_block(samples: Sequence[Sample], where: str = "") -> str:
    """Every prompt with the methods' answers beside each other. `where`: under which load."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.workload, sample.prompt), []).append(sample)
    blocks = [_sample_group(group) for group in groups.values()]
    if not blocks:
        return ""
    legend = paragraph(
        'Tokens that a drafter guessed and the target accepted are <mark class="draft">shaded and '
        f"underlined</mark>; the others are the target's own. First repeat{text(where)}.",
        kind="note",
    )
    more = counted(len(blocks) - SHOWN_OPEN, "more prompt")
    rest = details(more, "\n".join(blocks[SHOWN_OPEN:]))
    return "\n".join([legend, *blocks[:SHOWN_OPEN], rest])


def _sample_group(group: Sequence[Sample]) -> str:
    first = group[0]
    in_order = sorted(group, key=lambda sample: setting_of_label(sample).sort_key)
    answers = "\n".join(_answer(sample, short_label(sample, group)) for sample in in_order)
    workload = "" if first.prompt.startswith(first.workload) else f"{first.workload}, "
    # Prompts that are not ours to show come without their text.
    question = f"<blockquote>{text(first.question)}</blockquote>\n" if first.question else ""
    return (
        f'<article>\n<h3 class="question">{text(workload + first.prompt)}</h3>\n{question}'
        f'<div class="answers">\n{answers}\n</div>\n</article>'
    )


def setting_of_label(sample: Sample | TreeSample) -> Setting:
    """`method` is a label: `p-eagle (my-head)`, `p-eagle N=31 (my-head)`, `p-eagle auto`."""
    found = LABEL.fullmatch(sample.method)
    if found is None:
        return Setting(sample.method, sample.num_speculative_tokens)
    nodes = int(found["nodes"]) if found["nodes"] else None
    depth, is_auto = sample.num_speculative_tokens, found["auto"] is not None
    return Setting(found["method"], depth, found["head"], nodes, is_auto)


def short_label(sample: Sample | TreeSample, group: Sequence[Sample] | Sequence[TreeSample]) -> str:
    """The head is left out where the method has only one."""
    setting = setting_of_label(sample)
    heads = {s.head for other in group if (s := setting_of_label(other)).method == setting.method}
    name = setting.name if len(heads) == 1 else sample.method
    return short_name(setting, {setting.series: name})


def _answer(sample: Sample, label: str) -> str:
    size = counted(len(sample.tokens), "token")
    drafted = sum(token.drafted for token in sample.tokens)
    shown = size if sample.method == NONE else f"{drafted} of {size} drafted"
    answer = "".join(token.text for token in sample.tokens)
    kind = "tokens code" if CODE.search(answer) else "tokens"
    return (
        f'<div class="answer"><h4>{text(label)}</h4>\n<p class="note">{shown}</p>\n'
        f'<div class="{kind}">{_tokens(sample)}</div></div>'
    )


def _tokens(sample: Sample) -> str:
    """Neighbouring drafts are one mark. Without a drafter nothing was drafted, whatever is said."""
    groups = groupby(sample.tokens, key=lambda t: t.drafted and sample.method != NONE)
    pieces = [(drafted, text("".join(t.text for t in group))) for drafted, group in groups]
    return "".join(f'<mark class="draft">{p}</mark>' if drafted else p for drafted, p in pieces)


def differences_block(differences: Sequence[AnswerDifference]) -> str:
    if not differences:
        return ""
    rows = [
        [
            f"{text(full_name(Setting(d.method, d.num_speculative_tokens)))}",
            f"{text(d.workload)}, {text(d.load)}",
            f"{text(d.prompt)}, turn {d.turn + 1}",
            str(d.position + 1),
            _token(d.expected, d.expected_text),
            _token(d.got, d.got_text),
            or_nothing(NOTHING if d.gap is None else f"{d.gap:.2g}"),
        ]
        for d in differences
    ]
    columns = ("setting", "workload, load", "prompt", "token", "none says", "it says", "gap")
    caption = "First token that differs, one row per answer"
    inner = table(columns, rows, caption=caption, kind="grid", words=(1, 2, 4, 5))
    return details(counted(len(rows), "difference"), inner)


def _token(token: int | None, words: str) -> str:
    return "(end)" if token is None else f"<code>{text(repr(words))}</code> {token}"


def looping_table(results: Results) -> str:
    """Acceptance with and without looping answers, by workload and setting."""
    names, rows = series_names(results.cells), list[list[str]]()
    chosen = [s for s in series.representatives(results) if s.method != NONE]
    for workload in series.workloads(results):
        for setting in chosen:
            cells = [
                cells[setting]
                for place, cells in by_place(results.cells).items()
                if place.workload == workload and setting in cells
            ]
            runs = [run for cell in cells for run in usable_runs(cell)]
            lengths = [n for run in runs if (n := run.acceptance_length) is not None]
            clean = [n for run in runs if (n := run.acceptance_without_looping) is not None]
            if lengths and clean:
                rows.append(
                    [
                        f"{text(workload)}, {text(short_name(setting, names))}",
                        share(series.looping_share(runs)),
                        length(fmean(lengths)),
                        length(fmean(clean)),
                    ]
                )
    columns = ("workload, setting", "looping answers", "acceptance length", "without them")
    return table(columns, rows, caption="Looping answers", kind="grid") if rows else ""
