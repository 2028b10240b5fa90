"""A second way to the same token ids: byte-level BPE through tiktoken, where it is known to give the same.

A tokenizer.json qualifies when its merges are proved equal to ranks (`headway.data.merges`), and its way of splitting
text is one that tiktoken can express: GPT-2's, one regular expression as in Llama 3 or Qwen, or digits one by one and
then GPT-2's. How two libraries split text cannot be proved, so both encode a sample of texts that try to tell them
apart, and during a build every so many texts once more.
"""

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.merges import NotProven, Pair, proven_ranks
from headway.data.probes import probes
from headway.data.tokenizer import TextTokenizer

__all__ = ["CHECK_EVERY", "EncodersDiffer", "TiktokenEncoder", "fast_encoder"]

Tokens = npt.NDArray[np.uint32]

CHECK_EVERY = 128
"""Of so many texts of a build, one is encoded by both libraries."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
# Where digits were cut out first, white space before one ends its piece, as if nothing followed.
_DIGITS_THEN_GPT2 = rf"\p{{N}}|{_CONTRACTIONS}| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?![^\s\p{{N}}])|\s+"

_NO_ID = 0xFFFFFFFF
_RUN_CHARS = 2048
_WORD, _OTHER = re.compile(r"\w"), re.compile(r"\W")


class EncodersDiffer(Exception):
    """The two libraries gave different tokens for a text."""


@dataclass
class TiktokenEncoder:
    """Encodes as a `TextTokenizer` does, through tiktoken."""

    slow: TextTokenizer
    encoding: Any
    ids: Tokens
    """The id of each rank; _NO_ID of a byte that the vocabulary has not."""
    lengths: npt.NDArray[np.int64]
    """Bytes of each rank."""
    added: re.Pattern[str] | None
    """Tokens that are read from the text before anything else is done to it."""
    normalize: Callable[[str], str]
    lacks: bool
    """Whether some byte has no token."""
    threads: int = field(default_factory=lambda: int(os.environ.get("RAYON_NUM_THREADS") or os.cpu_count() or 1))
    encoded: int = 0
    """Texts so far."""

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Token ids of each text, in parallel; Differs if a text that is checked has others."""
        # A hand-over for every text would cost a tenth of encoding a short one.
        size = -(-len(texts) // (4 * self.threads)) or 1
        groups = [texts[start : start + size] for start in range(0, len(texts), size)]
        with ThreadPoolExecutor(self.threads) as pool:
            made = [ids for group in pool.map(self._encode_all, groups) for ids in group]
        first = -self.encoded % CHECK_EVERY
        self.encoded += len(texts)
        for text, ids in zip(texts[first::CHECK_EVERY], made[first::CHECK_EVERY], strict=True):
            self.check(text, ids)
        return made

    def _encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def encode(self, text: str) -> Tokens:
        """Token ids of one text."""
        if _has_long_run(text):
            return self.slow.encode(text)
        if self.added is None or not self.added.search(text):
            return self._plain(text)
        pieces = self.added.split(text)  # text and added tokens by turns
        made = [self._added(piece) if at % 2 else self._plain(piece) for at, piece in enumerate(pieces)]
        return np.concatenate(made)

    def check(self, text: str, ids: Tokens) -> None:
        """Differs if the other library encodes a text to other ids."""
        if not np.array_equal(self.slow.encode(text), ids):
            raise EncodersDiffer(f"tiktoken and tokenizers disagree on a text that begins {text[:40]!r}")

    def _added(self, token: str) -> Tokens:
        return np.array([self.slow.raw.token_to_id(token)], dtype=np.uint32)

    def _plain(self, text: str) -> Tokens:
        text = self.normalize(text)
        try:
            # Faster than encode_to_numpy, which looks for special tokens even where there are none.
            ranks = np.array(self.encoding.encode_ordinary(text), dtype=np.uint32)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # how a limit of its regular expressions ends a call
                raise
            return self.slow.encode(text)
        # tiktoken leaves out what no part of its pattern matches.
        if int(self.lengths[ranks].sum()) != len(text.encode()):
            raise EncodersDiffer(f"tiktoken leaves out part of a text that begins {text[:40]!r}")
        ids: Tokens = self.ids[ranks]
        return self.slow.encode(text) if self.lacks and (ids == _NO_ID).any() else ids


def _has_long_run(text: str) -> bool:
    """Whether letters, signs or white space follow each other for thousands of characters.

    tiktoken takes time by the square of a run's length. A run of twice the stretch covers one whole stretch, and what
    has letters and others in it is no run.
    """
    for start in range(0, len(text) - _RUN_CHARS, _RUN_CHARS):
        end = start + _RUN_CHARS
        if not (_WORD.search(text, start, end) and _OTHER.search(text, start, end)):
            return True
    return False


def fast_encoder(slow: TextTokenizer) -> TiktokenEncoder:
    """The same tokenizer through tiktoken; NotProven says why it cannot be had, Differs that it would be wrong."""
    try:
        import tiktoken
    except ImportError:
        raise NotProven("the tiktoken package is not installed") from None
    content = json.loads(slow.raw.to_str())
    pattern, normalize = _pattern(content["pre_tokenizer"]), _normalizer(content["normalizer"])
    vocab, merges = _model(content["model"], {token["content"] for token in content["added_tokens"]})
    ranks = proven_ranks(merges)
    if {token for token in ranks if len(token) > 1} != {token for token in vocab if len(token) > 1}:
        raise NotProven("its vocabulary has tokens that no merge makes")
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


# -- what a tokenizer.json says


def _pattern(pre: Any) -> str:
    """One regular expression that splits text as a pre-tokenizer does."""
    steps = _steps(pre)
    match [step["type"] for step in steps]:
        case ["ByteLevel"] if _plain_bytes(steps[0], use_regex=True):
            return _GPT2
        case ["Split", "ByteLevel"] if _plain_bytes(steps[1], use_regex=False) and _isolates(steps[0]):
            return str(steps[0]["pattern"]["Regex"])
        case ["Digits", "ByteLevel"] if _plain_bytes(steps[1], use_regex=True) and steps[0]["individual_digits"]:
            return _DIGITS_THEN_GPT2
    raise NotProven("its pre-tokenizer is none that one regular expression stands for")


def _steps(part: Any) -> list[dict[str, Any]]:
    """A pre-tokenizer or normalizer as a list of simple ones."""
    if part is None:
        return []
    inner = part.get("pretokenizers", part.get("normalizers"))
    return [part] if part["type"] != "Sequence" else [step for one in inner for step in _steps(one)]


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
    """The vocabulary and the merges in bytes, without added tokens."""
    wrong = [
        key
        for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        if model.get(key)
    ]
    if model["type"] != "BPE" or wrong:
        raise NotProven(f"its model is {model['type']}{' with ' + wrong[0] if wrong else ''}, not plain byte-level BPE")
    # Other letters below 256 stand for no byte either, so that none of them must pass for one.
    table = dict.fromkeys(range(256), 0x10FFFF) | {ord(letter): value for value, letter in _alphabet()}
    try:
        bytes_of = {token: token.translate(table).encode("latin-1") for token in model["vocab"] if token not in added}
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        merges = [(bytes_of[left], bytes_of[right]) for left, right in pairs]
    except UnicodeEncodeError as error:
        raise NotProven(f"its vocabulary has {error.object!r}, which stands for no bytes") from None
    except KeyError as error:
        raise NotProven(f"it merges {error.args[0]!r}, which is no token") from None
    return {content: model["vocab"][token] for token, content in bytes_of.items()}, merges


def _alphabet() -> Iterator[tuple[int, str]]:
    """(byte, letter): printable bytes are their own letters, others take those from 256 on."""
    other = 256
    for value in range(256):
        if 33 <= value <= 126 or 161 <= value <= 172 or 174 <= value <= 255:
            yield value, chr(value)
        else:
            yield value, chr(other)
            other += 1


def _added_pattern(added: Sequence[dict[str, Any]], special_as_text: bool) -> re.Pattern[str] | None:
    """What finds the added tokens that are read from text, the longest first where several begin together."""
    read = [token for token in added if not (token["special"] and special_as_text)]
    if any(token[key] for token in read for key in ("lstrip", "rstrip", "single_word")):
        raise NotProven("it has added tokens that take in white space or whole words")
    words = sorted((token["content"] for token in read), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, words))})") if words else None
