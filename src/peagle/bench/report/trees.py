"""A tree of drafts as a picture: an outline with a line for each node, as wide as a phone.

The nodes that the target took stand in boxes, its own token behind them in a dashed one: colours
only help. Colours are the page's, so that the picture is light or dark with it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from peagle.bench.report.answers import setting_of_label, short_label
from peagle.bench.report.markup import paragraph, text
from peagle.bench.results.document import TreeSample
from peagle.bench.results.figures import counted

LINE, CHARACTER = 24, 7.8  # pixels: the height of a line, the width of a monospaced character
INDENT, MOST_INDENT = 22, 150  # of a depth, and of all of them where the tree is deep
LONGEST = 16, 27  # characters of a token, and of the text before the tree
ROOT, BONUS = 0, -1
SIGNS = {" ": "\N{MIDDLE DOT}", "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\u21e5"}


class Place(NamedTuple):
    """A line of the outline."""

    node: int  # counted from 1; or ROOT, or BONUS
    line: int
    depth: int
    parent: int  # the line of the node before it


def trees_block(trees: Sequence[TreeSample]) -> str:
    if not trees:
        return ""
    legend = (
        "One step of a real answer for each method, with about as many accepted drafts as usual. "
        "A draft stands below the one that it follows. Those in boxes are what the target wrote, "
        "so the step kept them; the dashed box is the token that it added. The others cost a row "
        "of the pass and nothing else. Numbers give the drafter's order, the most probable path "
        "first; dots are spaces."
    )
    in_order = sorted(trees, key=lambda tree: setting_of_label(tree).sort_key)
    figures = "\n".join(_figure(tree, short_label(tree, trees)) for tree in in_order)
    return f'{paragraph(text(legend), kind="note")}\n<div class="trees">\n{figures}\n</div>'


def _figure(tree: TreeSample, label: str) -> str:
    accepted = sum(node.accepted for node in tree.nodes)
    what = f"{accepted} of {counted(len(tree.nodes), 'draft')} accepted"
    workload = "" if tree.prompt.startswith(tree.workload) else f"{tree.workload}, "
    return (
        f'<figure class="tree">\n<h3>{text(label)}</h3>\n'
        f"<figcaption>{text(f'{what}, {workload}{tree.prompt}')}</figcaption>\n"
        f"{_drawing(tree)}\n</figure>"
    )


def _drawing(tree: TreeSample) -> str:
    places = list(outline(tree))
    indent = min(INDENT, MOST_INDENT / max(place.depth for place in places))
    words = {place.node: _words(tree, place.node) for place in places}
    starts = {place.line: 10 + indent * place.depth for place in places}
    ends = [starts[place.line] + _width(words[place.node]) + 12 for place in places]
    width, height = max(ends) + 30, LINE * len(places) + 6
    is_taken = [n in (ROOT, BONUS) or tree.nodes[n - 1].accepted for n in words]
    # What was taken is drawn last, above the rest.
    order = sorted(places, key=lambda place: is_taken[place.line])
    parts = [_connector(place, starts, taken=is_taken[place.line]) for place in order if place.line]
    parts += [_token(place, starts[place.line], words[place.node], taken=is_taken[place.line])
              for place in order]  # fmt: skip
    parts += [
        f'<text class="rank" x="{width - 4:g}" y="{_middle(place.line) + 4:g}">{place.node}</text>'
        for place in places
        if place.node > 0
    ]
    inner = "\n".join(parts)
    return (
        f'<svg role="img" aria-label="{text(_in_words(tree))}" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}">\n{inner}\n</svg>'
    )


def outline(tree: TreeSample) -> Iterator[Place]:
    """Depth first, children by their probability. The target's own token comes before those of its
    siblings that it did not take, so that the path stays in one piece."""
    children: dict[int, list[int]] = {}
    for number, node in enumerate(tree.nodes, start=1):
        children.setdefault(node.parent, []).append(number)
    if tree.bonus:
        last = max((n for n, node in enumerate(tree.nodes, 1) if node.accepted), default=ROOT)
        children.setdefault(last, []).insert(0, BONUS)
    waiting = [(ROOT, 0, 0)]
    line = 0
    while waiting:
        number, depth, parent = waiting.pop()
        yield Place(number, line, depth, parent)
        waiting += [(child, depth + 1, line) for child in reversed(children.get(number, []))]
        line += 1


def _words(tree: TreeSample, node: int) -> str:
    if node == ROOT:
        shown = _visible(tree.before)
        return shown if len(shown) <= LONGEST[1] else f"\u2026{shown[-LONGEST[1] :]}"
    shown = _visible(tree.bonus if node == BONUS else tree.nodes[node - 1].text)
    return shown if len(shown) <= LONGEST[0] else f"{shown[: LONGEST[0]]}\u2026"


def _visible(words: str) -> str:
    """Spaces and breaks as signs. What would turn or hide its neighbours is replaced."""
    signs = (SIGNS.get(character, character) for character in words)
    return "".join("\ufffd" if unicodedata.category(c)[0] == "C" else c for c in signs)


def _width(words: str) -> float:
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in words)
    return CHARACTER * (len(words) + wide)


def _middle(line: int) -> float:
    return LINE * (line + 0.5) + 3


def _connector(place: Place, starts: dict[int, float], *, taken: bool) -> str:
    """From below the parent's first character, down and to the right."""
    x, y = starts[place.parent] + 6, _middle(place.line)
    kind = "own" if place.node == BONUS else "taken" if taken else "other"
    top = _middle(place.parent) + 10
    return f'<path class="{kind}" d="M{x:g} {top:g}V{y:g}H{starts[place.line]:g}"/>'


def _token(place: Place, x: float, words: str, *, taken: bool) -> str:
    y = _middle(place.line)
    kind = {ROOT: "root", BONUS: "own"}.get(place.node, "taken" if taken else "other")
    box = ""
    if kind in ("taken", "own"):
        width = _width(words) + 10
        box = (
            f'<rect class="{kind}" x="{x:g}" y="{y - 10:g}" width="{width:g}" height="20" rx="4"/>'
        )
    return f'{box}<text class="{kind}" x="{x + 5:g}" y="{y + 4.5:g}">{text(words)}</text>'


def _in_words(tree: TreeSample) -> str:
    taken = [_visible(node.text) for node in tree.nodes if node.accepted]
    accepted = f"accepted {', '.join(taken)}" if taken else "accepted none"
    added = f" and added {_visible(tree.bonus)}" if tree.bonus else ""
    return f"A tree of {counted(len(tree.nodes), 'draft')}. The target {accepted}{added}."
