"""N-gram drafter: no weights. What followed the same words before may follow them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import log

from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.models.drafter import CacheLayout, SequenceDraft

MAX_MATCHES = 16  # whose continuations become a tree
WEIGHT_PER_TOKEN = 4.0  # that a match is longer
MAX_WEIGHTED_TOKENS = 64  # beyond them longer is no better; powers of more overflow


@dataclass
class _Node:
    """A token of the trie of continuations; the root is the history's last."""

    token: int
    score: float = 0.0  # log-probability of its path
    weight: float = 0.0  # of all matches that go through it
    parent: _Node | None = None
    children: dict[int, _Node] = field(default_factory=dict)
    row: int = 0


class NgramDrafter:
    """Proposes the tokens that followed earlier occurrences of suffixes of the history, of
    `longest` down to `shortest` tokens: as a chain those behind the most recent occurrence of the
    longest, as a tree those behind several, the more probable the more often they followed, the
    longer the suffix and the more recent the occurrence."""

    method = "ngram"
    aux_hidden_state_layers: tuple[int, ...] = ()
    cache_layout: CacheLayout | None = None
    max_speculative_tokens = max_tree_depth = MAX_SPECULATIVE_TOKENS
    max_positions: int | None = None
    rows_per_depth = 1
    weights_per_row = weights_per_depth = 0

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = shortest
        self.longest = longest

    def propose(
        self, histories: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[SequenceDraft]:
        asked = zip(histories, counts, strict=True)
        return [SequenceDraft(self._chain(history, count)) for history, count in asked]

    def propose_trees(
        self, histories: Sequence[Sequence[int]], counts: Sequence[int], depths: Sequence[int]
    ) -> list[SequenceDraft]:
        asked = zip(histories, counts, depths, strict=True)
        return [self._tree(history, count, depth) for history, count, depth in asked]

    def _chain(self, history: Sequence[int], count: int) -> list[int]:
        if count:
            for start, _ in self._matches(history):
                return _continuation(history, start, count)
        return []

    def _tree(self, history: Sequence[int], count: int, depth: int) -> SequenceDraft:
        """Of matches with a weight each, the share of it behind a prefix that goes through a token,
        with one more such match that nobody knows: so a path is less probable than its beginning.
        """
        root = _Node(history[-1])
        nodes: list[_Node] = []
        found = islice(self._matches(history), MAX_MATCHES) if depth else ()
        for rank, (start, size) in enumerate(found, start=1):
            extra = min(size - self.shortest, MAX_WEIGHTED_TOKENS)
            weight = WEIGHT_PER_TOKEN**extra / rank
            node = root
            node.weight += weight
            for token in _continuation(history, start, depth):
                if token not in node.children:
                    node.children[token] = _Node(token, parent=node)
                    nodes.append(node.children[token])
                node = node.children[token]
                node.weight += weight
        for node in nodes:  # parents first
            assert node.parent is not None
            node.score = node.parent.score + log(node.weight / (node.parent.weight + 1.0))
        best = sorted(nodes, key=lambda node: -node.score)[:count]  # stable
        for row, node in enumerate(best, start=1):
            node.row = row
        parents = [0 if node.parent is None else node.parent.row for node in best]
        scores = [node.score for node in best]
        return SequenceDraft([node.token for node in best], None, parents, scores)

    def _matches(self, history: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Where the history goes on behind earlier occurrences of its suffixes, and how long these
        are: the longest first, of one length the most recent."""
        # Strings of code points: `rfind` searches in C what a loop over ints would do in Python.
        text = "".join(map(chr, history))
        seen = set[int]()
        for size in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            suffix, end = text[-size:], len(text) - 1
            while (found := text.rfind(suffix, 0, end)) >= 0:
                end = found + size - 1  # the next one ends before this one does
                if found + size not in seen:
                    seen.add(found + size)
                    yield found + size, size


def _continuation(history: Sequence[int], start: int, count: int) -> list[int]:
    period = len(history) - start  # a draft longer than this repeats itself
    return [history[start + i % period] for i in range(count)]
