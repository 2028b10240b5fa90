"""Prove that two ways to apply the merges of a byte-pair encoding give the same tokens for every text.

`tokenizers` merges the pairs in its list, in the order of the list. tiktoken only knows tokens and their ranks: it
merges any two neighbours that together are a token, the one of the lowest rank first. The two differ where neighbours
form a token by another pair than the list has.

They can be proven equal, token by token. Let t be a token whose first pair is at position r of the list, and apply to
the bytes of t all merges before r: call that its last split. What happens inside a stretch of text does not depend on
its surroundings as long as nothing is merged across its ends; so wherever two neighbours that form t are left after
all merges before r, they are the last split of t. If the list has that pair at r, then no other pair that forms t ever
occurs, and both ways merge the same neighbours at the same time. If that holds for all tokens, they agree on every
text.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

Pair = tuple[bytes, bytes]


class NotProven(Exception):
    """Why two encoders are not known to agree."""


def proven_ranks(merges: Sequence[Pair]) -> dict[bytes, int]:
    """Return tokens by rank: the 256 bytes, then merged tokens in order. Raise NotProven if ranks do not suffice."""
    ranks = {bytes([value]): value for value in range(256)}
    positions = {pair: position for position, pair in reversed(list(enumerate(merges)))}
    first: dict[bytes, int] = {}
    last: dict[bytes, int] = {}
    for position, (left, right) in enumerate(merges):
        token = left + right
        if first.setdefault(token, position) == position:
            ranks[token] = len(ranks)
            last[token] = position
        elif last[token] == position - 1:  # another pair of the same token, directly after the previous one
            last[token] = position
    if len(ranks) != 256 + len(first):
        raise NotProven("a merge makes a single byte")
    for token, position in first.items():
        split = _apply(token, positions, position)
        if len(split) != 2 or not position <= positions.get((split[0], split[1]), -1) <= last[token]:
            raise NotProven(f"token {token!r} could be merged from a pair that the list does not have")
    return ranks


def _apply(text: bytes, positions: Mapping[Pair, int], end: int) -> list[bytes]:
    """Return a text's parts after all merges before a position of the list."""
    parts = [text[i : i + 1] for i in range(len(text))]
    while len(parts) > 1:
        candidates = [positions.get(pair, end) for pair in pairwise(parts)]
        least = min(candidates)
        if least >= end:
            break
        at = candidates.index(least)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
