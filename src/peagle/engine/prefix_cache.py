"""Prefix caching: blocks whose content is known, kept for requests that begin alike.

What a block holds follows from tokens. The target's row p comes from tokens 0 .. p; the drafter's
row p, in the same block, from the token behind it as well. So a block is known by all tokens up to
the one behind its last position: where that one differs, the block is not shared. Keys are a chain
of SHA-256, each over the key before it and the tokens that come with its block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

Key = bytes


@dataclass
class PrefixCacheStats:
    """Of requests that were admitted; one that comes back after preemption is not counted again."""

    queries: int = 0  # tokens that were looked up
    hits: int = 0  # those that the cache had


def extend_keys(
    keys: list[Key], token_ids: Sequence[int], block_size: int, *, is_drafted: bool
) -> None:
    """Adds the keys of blocks that `token_ids` have completed since. `is_drafted`: the blocks hold
    the drafter's rows as well."""
    known, num_blocks = len(keys), (len(token_ids) - 1) // block_size
    if known >= num_blocks:
        return
    begin = known * block_size
    tokens = np.array(token_ids[begin : num_blocks * block_size + 1], dtype=np.int64)
    for end in range(block_size, len(tokens), block_size):
        # Each block's own tokens are those behind the block before it, up to the one behind it.
        first = end - block_size + 1 if keys else 0
        before = keys[-1] if keys else bytes([is_drafted])
        keys.append(sha256(before + tokens[first : end + 1].tobytes()).digest())


class PrefixCache:
    """Known blocks by their keys. Those that no request holds can be had, the one that was not
    used for longest first."""

    def __init__(self) -> None:
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    def knows(self, key: Key) -> bool:
        return key in self._blocks

    def add(self, key: Key, block: int) -> None:
        """A block that somebody holds. If another block has the same content, that one stays."""
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key

    def take(self, key: Key) -> int:
        """The block that is known by it; somebody holds it from now on."""
        block = self._blocks[key]
        self._unused.pop(block, None)
        return block

    def release(self, block: int) -> bool:
        """Nobody holds it any more -> whether it is kept."""
        if block in self._keys:
            self._unused[block] = None
        return block in self._keys

    def evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        del self._blocks[self._keys.pop(block)]
        return block

    def check(self, held: Collection[int]) -> None:
        """Asserts that keys and blocks belong together, and that each of these is held or unused.
        It looks at every block."""
        assert {self._blocks[key]: key for key in self._blocks} == self._keys
        assert len(self._blocks) == len(self._keys)
        assert self._keys.keys() - held == self._unused.keys(), "a block is held and unused"
