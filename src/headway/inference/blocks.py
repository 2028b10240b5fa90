"""Blocks of the KV cache: which are free, who holds them, and which prefix each has.

A block is the place of `size` tokens in every layer's cache. A full block whose content is known by a hash can be
shared by all sequences with that prefix. Blocks without holders keep their content until they are needed: the least
recently used goes first. Shared blocks are full, so they are never written again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """The blocks of a cache, by number."""

    def __init__(self, count: int, size: int, *, shares_prefixes: bool = True) -> None:
        self.count, self.size, self.shares_prefixes = count, size, shares_prefixes
        self.holders = [0] * count
        """How many sequences hold each block."""
        self._idle = OrderedDict[int, None].fromkeys(range(count))
        """Blocks without holders, the least recently used first."""
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks of that many tokens."""
        return -(-tokens // self.size)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix; nothing changes."""
        blocks = []
        for key in hashes:
            block = self._by_hash.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def idle_among(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks have no holder: sharing them takes them from the free ones."""
        return sum(self.holders[block] == 0 for block in blocks)

    def freed_by(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks would become free if one holder released them."""
        return sum(self.holders[block] == 1 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Have one more holder for each."""
        for block in blocks:
            self._idle.pop(block, None)
            self.holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return blocks with one holder, whose content is forgotten."""
        assert count <= self.free, "the scheduler counts free blocks first"
        blocks = []
        for _ in range(count):
            block, _nothing = self._idle.popitem(last=False)
            self._forget(block)
            self.holders[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Have one holder less for each; the end of a prefix is reused before its beginning."""
        for block in reversed(blocks):
            self.holders[block] -= 1
            assert self.holders[block] >= 0, "a block is released once per holder"
            if self.holders[block] == 0:
                self._idle[block] = None
                if block not in self._hashes:  # no prefix leads to it
                    self._idle.move_to_end(block, last=False)

    def publish(self, block: int, key: bytes) -> None:
        """Let others share a full block by the hash of its prefix; if one has it already, this stays private."""
        if self.shares_prefixes and key not in self._by_hash:
            self._forget(block)
            self._by_hash[key], self._hashes[block] = block, key

    def forget_prefixes(self) -> None:
        """Share nothing of what is in the cache now."""
        self._by_hash.clear()
        self._hashes.clear()

    def _forget(self, block: int) -> None:
        key = self._hashes.pop(block, None)
        if key is not None:
            del self._by_hash[key]
