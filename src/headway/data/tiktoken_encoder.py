"""Encode byte-level BPE faster, through tiktoken, if it provably gives the same token ids.

A tokenizer.json qualifies if its merges are proven equal to ranks (`headway.data.merges`), and tiktoken can express
how it splits text: GPT-2's pattern, one regular expression as in Llama 3 or Qwen, or single digits and then GPT-2's.
That two libraries split text alike cannot be proven, so both encode a fixed set of probe texts, and during a build one
in `CHECK_EVERY` texts.
"""

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.merges import NotProven, Pair, proven_ranks
from headway.data.probes import probes
from headway.data.tokenizer import TextTokenizer

Tokens = npt.NDArray[np.uint32]

CHECK_EVERY = 128
"""One in so many texts of a build is encoded by both libraries."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
# Digits are split off first, so white space before a digit ends its piece as if nothing followed.
_DIGITS_THEN_GPT2 = rf"\p{{N}}|{_CONTRACTIONS}| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?![^\s\p{{N}}])|\s+"

_NO_ID = 0xFFFFFFFF
_RUN_CHARS = 2048
_WORD, _OTHER = re.compile(r"\w"), re.compile(r"\W")


class EncodersDiffer(Exception):
    """The two libraries gave different tokens for a text."""


class _Panic(Exception):
    """tiktoken gave up on a text."""


@dataclass
class TiktokenEncoder:
    """Encodes as a `TextTokenizer` does, through tiktoken."""

    slow: TextTokenizer
    encoding: Any
    ids: Tokens
    """The id of each rank; _NO_ID for a byte that is not in the vocabulary."""
    lengths: npt.NDArray[np.int64]
    """Bytes of each rank."""
    added: re.Pattern[str] | None
    """Matches added tokens, which are split off before anything else."""
    normalize: Callable[[str], str]
    lacks: bool
    """Whether some bytes have no token."""
    threads: int = field(default_factory=lambda: int(os.environ.get("RAYON_NUM_THREADS") or os.cpu_count() or 1))
    encoded: int = 0
    """Texts encoded so far."""

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode texts in parallel; raise EncodersDiffer if a checked text gets other ids."""
        # Groups: one task per text would add a tenth to the time of a short one.
        size = -(-len(texts) // (4 * self.threads)) or 1
        groups = [texts[start : start + size] for start in range(0, len(texts), size)]
        with ThreadPoolExecutor(self.threads) as pool:
            results = pool.map(self._encode_group, groups)
            encoded = [ids for group in results for ids in group]
        first = -self.encoded % CHECK_EVERY
        self.encoded += len(texts)
        for text, ids in zip(texts[first::CHECK_EVERY], encoded[first::CHECK_EVERY], strict=True):
            self.check(text, ids)
        return encoded

    def _encode_group(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode texts in turn. Ranks become ids all at once: that was two fifths of the time of short texts."""
        if not any(map(self._is_special, texts)):
            plain = [self.normalize(text) for text in texts]
            with suppress(_Panic):
                ranks = [self._ranks(text) for text in plain]
                ends = list(accumulate(map(len, ranks)))
                flat = np.fromiter(chain.from_iterable(ranks), dtype=np.uint32, count=ends[-1] if ends else 0)
                ids = self.ids[flat]
                complete = int(self.lengths[flat].sum()) == sum(len(text.encode()) for text in plain)
                if complete and not (self.lacks and (ids == _NO_ID).any()):
                    return [ids[start:end] for start, end in pairwise([0, *ends])]
        return [self.encode(text) for text in texts]

    def _is_special(self, text: str) -> bool:
        """Whether a text needs more than tiktoken's own encoding."""
        return _has_long_run(text) or (self.added is not None and self.added.search(text) is not None)

    def _ranks(self, text: str) -> list[int]:
        try:
            # Faster than encode_to_numpy, which searches for special tokens even if there are none.
            ranks: list[int] = self.encoding.encode_ordinary(text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # raised at a limit of its regular expressions
                raise
            raise _Panic from None
        return ranks

    def encode(self, text: str) -> Tokens:
        """Encode one text."""
        if _has_long_run(text):
            return self.slow.encode(text)
        if self.added is None or not self.added.search(text):
            return self._plain(text)
        pieces = self.added.split(text)  # text and added tokens alternate
        return np.concatenate([self._added(piece) if i % 2 else self._plain(piece) for i, piece in enumerate(pieces)])

    def check(self, text: str, ids: Tokens) -> None:
        """Raise EncodersDiffer if `tokenizers` encodes a text to other ids."""
        if not np.array_equal(self.slow.encode(text), ids):
            raise EncodersDiffer(f"tiktoken and tokenizers disagree on a text that begins {text[:40]!r}")

    def _added(self, token: str) -> Tokens:
        return np.array([self.slow.raw.token_to_id(token)], dtype=np.uint32)

    def _plain(self, text: str) -> Tokens:
        text = self.normalize(text)
        try:
            ranks = np.array(self._ranks(text), dtype=np.uint32)
        except _Panic:
            return self.slow.encode(text)
        # tiktoken drops what its pattern does not match.
        if int(self.lengths[ranks].sum()) != len(text.encode()):
            raise EncodersDiffer(f"tiktoken drops part of a text that begins {text[:40]!r}")
        ids: Tokens = self.ids[ranks]
        return self.slow.encode(text) if self.lacks and (ids == _NO_ID).any() else ids


def _has_long_run(text: str) -> bool:
    """Whether a text has a run of thousands of word characters or of other characters.

    tiktoken's time is quadratic in the length of a run. Text is checked in stretches: a run twice as long covers one
    completely, and a stretch with both kinds of characters is not part of one.
    """
    for start in range(0, len(text) - _RUN_CHARS, _RUN_CHARS):
        end = start + _RUN_CHARS
        if not (_WORD.search(text, start, end) and _OTHER.search(text, start, end)):
            return True
    return False


def fast_encoder(slow: TextTokenizer) -> TiktokenEncoder:
    """Return the same tokenizer through tiktoken; raise NotProven or EncodersDiffer if it might give other ids."""
    try:
        import tiktoken
    except ImportError:
        raise NotProven("the tiktoken package is not installed") from None
    content = json.loads(slow.raw.to_str())
    pattern, normalize = _pattern(content["pre_tokenizer"]), _normalizer(content["normalizer"])
    vocab, merges = _model(content["model"], {token["content"] for token in content["added_tokens"]})
    ranks = proven_ranks(merges)
    if {token for token in ranks if len(token) > 1} != {token for token in vocab if len(token) > 1}:
        raise NotProven("its vocabulary has tokens that no merge produces")
    encoding = tiktoken.Encoding("headway", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    encoder = TiktokenEncoder(
        slow,
        encoding,
        ids=np.array([vocab.get(token, _NO_ID) for token in ranks], dtype=np.uint32),
        lengths=np.array([len(token) for token in ranks], dtype=np.int64),
        added=_added_pattern(content["added_tokens"], bool(slow.raw.encode_special_tokens)),
        normalize=normalize,
        lacks=not set(ranks) <= set(vocab),
    )
    for text in probes([token["content"] for token in content["added_tokens"]]):
        encoder.check(text, encoder.encode(text))
    return encoder


# -- parsing a tokenizer.json


def _pattern(pre: Any) -> str:
    """Return one regular expression that splits text like a pre-tokenizer."""
    steps = _steps(pre)
    match [step["type"] for step in steps]:
        case ["ByteLevel"] if _plain_bytes(steps[0], use_regex=True):
            return _GPT2
        case ["Split", "ByteLevel"] if _plain_bytes(steps[1], use_regex=False) and _isolates(steps[0]):
            return str(steps[0]["pattern"]["Regex"])
        case ["Digits", "ByteLevel"] if _plain_bytes(steps[1], use_regex=True) and steps[0]["individual_digits"]:
            return _DIGITS_THEN_GPT2
    raise NotProven("its pre-tokenizer is not equivalent to one regular expression")


def _steps(part: Any) -> list[dict[str, Any]]:
    """Flatten a pre-tokenizer or normalizer into a list of simple ones."""
    if part is None:
        return []
    inner = part.get("pretokenizers", part.get("normalizers"))
    return [part] if part["type"] != "Sequence" else [step for nested in inner for step in _steps(nested)]


def _plain_bytes(step: dict[str, Any], use_regex: bool) -> bool:
    return not step["add_prefix_space"] and step.get("use_regex", True) == use_regex


def _isolates(step: dict[str, Any]) -> bool:
    return step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]


def _normalizer(part: Any) -> Callable[[str], str]:
    kinds = [step["type"] for step in _steps(part)]
    if not kinds:
        return str
    if kinds == ["NFC"]:
        return lambda text: unicodedata.normalize("NFC", text)
    raise NotProven(f"its normalizer is {' and '.join(kinds)}")


def _model(model: dict[str, Any], added: set[str]) -> tuple[dict[bytes, int], list[Pair]]:
    """Return the vocabulary and the merges as bytes, without added tokens."""
    wrong = [
        key
        for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        if model.get(key)
    ]
    if model["type"] != "BPE" or wrong:
        raise NotProven(f"its model is {model['type']}{' with ' + wrong[0] if wrong else ''}, not plain byte-level BPE")
    # Characters below 256 outside the alphabet represent no byte: map them to one that latin-1 cannot encode.
    table = dict.fromkeys(range(256), 0x10FFFF) | {ord(letter): value for value, letter in _alphabet()}
    try:
        bytes_of = {token: token.translate(table).encode("latin-1") for token in model["vocab"] if token not in added}
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        merges = [(bytes_of[left], bytes_of[right]) for left, right in pairs]
    except UnicodeEncodeError as error:
        raise NotProven(f"its vocabulary has {error.object!r}, which represents no bytes") from None
    except KeyError as error:
        raise NotProven(f"it merges {error.args[0]!r}, which is not a token") from None
    return {content: model["vocab"][token] for token, content in bytes_of.items()}, merges


def _alphabet() -> Iterator[tuple[int, str]]:
    """Yield (byte, character): printable bytes represent themselves, others use characters from 256 on."""
    other = 256
    for value in range(256):
        if 33 <= value <= 126 or 161 <= value <= 172 or 174 <= value <= 255:
            yield value, chr(value)
        else:
            yield value, chr(other)
            other += 1


def _added_pattern(added: Sequence[dict[str, Any]], special_as_text: bool) -> re.Pattern[str] | None:
    """Return a pattern for added tokens that are parsed in text, the longest first if several start together."""
    parsed = [token for token in added if not (token["special"] and special_as_text)]
    if any(token[key] for token in parsed for key in ("lstrip", "rstrip", "single_word")):
        raise NotProven("it has added tokens that absorb white space or match whole words only")
    contents = sorted((token["content"] for token in parsed), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, contents))})") if contents else None
