"""Fixed probe texts, some 300 kB, that expose differences between two encoders."""

import random
from collections.abc import Iterator, Sequence

_TEXT = (
    "the of and Headway trains isn't I'll they've we're you'd she's it'S DON'T naïve café Ærøskøbing straße ΑΒΓ αβγ "
    "привет мир שלום مرحبا नमस्ते สวัสดี 你好世界 こんにちは カタカナ 안녕하세요 ǅ ﬁn ſ İstanbul ıI 𝔘𝔫𝔦 "
    "Ⅷ ½ ² ١٢٣ ४५ ５６ x_y __init__ a1b2 3.14 1,000,000 0x7f 12345678901234567890 e.g. http://a.b/c?d=e&f#g "
    "foo@bar.com C++ <html> </s> {} [] () -- ... => !== ''' \"\"\" \\n \\u00e9 👍 👩\u200d👩\u200d👧 🇩🇪 e\u0301 \u0301 "
    "\u200b \u200d \ufeff \u00ad \u2028 \u2029 \x85 \x0b \x0c \x1c \x7f \0"
)
_WORDS = _TEXT.split(" ")
_SPACES = (
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\t",
    " \n",
    "\n ",
    "\t\t ",
    "\u00a0",
    "\u2003",
    "\u3000",
    " \u00a0 ",
    "",
)
_RANGES = (
    (0x20, 0x3000),
    (0x3000, 0xD800),
    (0xE000, 0x10000),
    (0x10000, 0x12000),
    (0x1D000, 0x20000),
    (0xE0000, 0xE0200),
)
"""Unicode ranges: the first is covered completely, the others are sampled."""


def probes(added: Sequence[str]) -> Iterator[str]:
    """Yield the texts; some contain a tokenizer's added tokens."""
    rng = random.Random(0)
    yield ""
    yield from _WORDS
    yield from (space + word + space for word in _WORDS for space in _SPACES)
    yield from ("a" * length for length in (1, 2, 3, 5, 17, 64, 300))
    yield from (
        space * length + tail
        for space in " \n\t\r"
        for length in (1, 2, 3, 4, 8, 15, 16, 31, 100)
        for tail in ("", "a", "1", ".")
    )
    yield from _letters(rng)
    words = [*_WORDS, *(token for token in added if token)]
    for length in (3, 10, 30, 100, 300):
        for _ in range(12):
            yield "".join(rng.choice(words) + rng.choice(_SPACES) for _ in range(length))
    for _ in range(60):
        yield "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0, 0x250)))) for _ in range(200))
    for _ in range(60):
        yield bytes(rng.randrange(256) for _ in range(300)).decode("utf-8", "replace")
    for token in added:
        yield from (token, f"a{token}b", f" {token}{token} {token}{token[:-1]} ", f"{token}\u0338")


def _letters(rng: random.Random) -> Iterator[str]:
    """Letters of all scripts next to characters that they may or may not be grouped with."""
    for first, end in _RANGES:
        step = 1 if first == 0x20 else 23
        letters = [chr(code) for code in range(first, end, step)]
        for start in range(0, len(letters), 40):
            chosen = letters[start : start + 40]
            yield "".join(f"{letter}{rng.choice(('a', ' ', '1', '.', ' a', chr(39)))}" for letter in chosen)
