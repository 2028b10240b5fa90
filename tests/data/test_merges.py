"""Soundness of the proof: whenever it is given, two naive encoders agree on every text."""

import itertools
import random

import pytest

from headway.data.merges import NotProven, proven_ranks


def by_list(text, merges):
    """The first pair of the list that is there is merged, its first place first; until none is."""
    places = {pair: place for place, pair in reversed(list(enumerate(merges)))}
    parts = [text[i : i + 1] for i in range(len(text))]
    while True:
        candidates = [(places[pair], at) for at, pair in enumerate(itertools.pairwise(parts)) if pair in places]
        if not candidates:
            return parts
        at = min(candidates)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def by_rank(text, ranks):
    """Any two neighbours that are a token together, the one of the lowest rank first, its first place first."""
    parts = [text[i : i + 1] for i in range(len(text))]
    while True:
        candidates = [(ranks[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not candidates:
            return parts
        at = min(candidates)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def random_merges(rng, count):
    """Pairs of what is there already; some make a token a second time, later or at once."""
    tokens, merges = [b"a", b"b"], []
    while len(merges) < count:
        pair = (rng.choice(tokens), rng.choice(tokens))
        if pair not in merges and len(pair[0] + pair[1]) <= 6:
            merges.append(pair)
            if pair[0] + pair[1] not in tokens:
                tokens.append(pair[0] + pair[1])
            if rng.random() < 0.3:
                token = pair[0] + pair[1]
                others = [(token[:i], token[i:]) for i in range(1, len(token))]
                merges += [p for p in others if p not in merges and p[0] in tokens and p[1] in tokens]
    return merges


TEXTS = ["".join(letters).encode() for size in range(1, 10) for letters in itertools.product("ab", repeat=size)]


def ranks_of(merges):
    """Ranks as tiktoken would be given them: bytes, then tokens in the order in which they are first made."""
    tokens = dict.fromkeys(a + b for a, b in merges)
    return {bytes([i]): i for i in range(256)} | {token: 256 + i for i, token in enumerate(tokens)}


def test_proven_merges_agree_on_every_text():
    rng = random.Random(0)
    proved = differed = 0
    for _ in range(200):
        merges = random_merges(rng, rng.randint(1, 6))
        texts = rng.sample(TEXTS, 60)
        same = all(by_list(text, merges) == by_rank(text, ranks_of(merges)) for text in texts)
        try:
            ranks = proven_ranks(merges)
        except NotProven:
            differed += not same
            continue
        proved += 1
        assert ranks == ranks_of(merges)
        assert same, merges
    assert proved > 30
    assert differed > 10


def test_a_token_merged_from_an_unlisted_pair_is_not_proven():
    """abc is listed as ab + c, but b + c comes first: a + bc is left, which a list does not merge and ranks do."""
    merges = [(b"b", b"c"), (b"a", b"b"), (b"ab", b"c")]
    assert by_list(b"abc", merges) == [b"a", b"bc"]
    assert by_rank(b"abc", ranks_of(merges)) == [b"abc"]
    with pytest.raises(NotProven, match="b'abc' could be merged from a pair that the list does not have"):
        proven_ranks(merges)
    assert proven_ranks([*merges[:2], (b"a", b"bc")])
    assert proven_ranks([*merges, (b"a", b"bc")])


def test_the_same_token_listed_again_later_is_not_the_same_time():
    merges = [(b"b", b"c"), (b"a", b"b"), (b"ab", b"c"), (b"c", b"a"), (b"a", b"bc")]
    with pytest.raises(NotProven):
        proven_ranks(merges)
