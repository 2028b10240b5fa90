"""When two ways to apply the merges of a byte-pair encoding give the same tokens for every text.

`tokenizers` merges the pairs that its list names, the first in the list first. tiktoken knows tokens and their ranks
only: it merges any two neighbours that together are a token, the one of the lowest rank first. The two differ where
neighbours make up a token in another way than the list says.

They can be proved equal, token by token. Let t be a token whose first pair stands at place r of the list, and apply to
the bytes of t all merges before r: call that its last split. What happens inside of a stretch of text does not depend
on what is around it, as long as nothing is merged across its ends; so wherever two neighbours that make up t are left
when all merges before r are done, they are the last split of t. If that is a pair which the list names at r, then no
other pair that makes up t is ever seen, and both ways merge the same neighbours at the same time. If it holds for all
tokens, they agree on every text.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

__all__ = ["NotProven", "proven_ranks"]

Pair = tuple[bytes, bytes]


class NotProven(Exception):
    """Two encoders that are not known to agree, and why."""


def proven_ranks(merges: Sequence[Pair]) -> dict[bytes, int]:
    """Tokens by rank: the 256 bytes, then what is merged, in its order. NotProven where ranks alone would not do."""
    ranks = {bytes([value]): value for value in range(256)}
    places = {pair: place for place, pair in reversed(list(enumerate(merges)))}
    first: dict[bytes, int] = {}
    last: dict[bytes, int] = {}
    for place, (left, right) in enumerate(merges):
        token = left + right
        if first.setdefault(token, place) == place:
            ranks[token] = len(ranks)
            last[token] = place
        elif last[token] == place - 1:  # another pair of the same token, right behind the one before
            last[token] = place
    if len(ranks) != 256 + len(first):
        raise NotProven("a merge makes a single byte")
    for token, place in first.items():
        split = _apply(token, places, place)
        if len(split) != 2 or not place <= places.get((split[0], split[1]), -1) <= last[token]:
            raise NotProven(f"token {token!r} could be merged in a way that the list does not name")
    return ranks


def _apply(text: bytes, places: Mapping[Pair, int], end: int) -> list[bytes]:
    """A text after all merges before a place of the list."""
    parts = [text[i : i + 1] for i in range(len(text))]
    while len(parts) > 1:
        found = [places.get(pair, end) for pair in pairwise(parts)]
        least = min(found)
        if least >= end:
            break
        at = found.index(least)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
