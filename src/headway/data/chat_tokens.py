"""Samples of chat to token ids with the span of each message.

The server encodes the whole text of a prompt. Tokenizers first split text at their added tokens, such as `<|im_end|>`,
and encode what is between them by itself; so do we, and static parts are encoded once. Where a turn of the model begins
inside such a part ("assistant\\n" and then the answer), the part is encoded whole, and must begin with the ids that the
server's prompt ends with. If it does not, since the tokenizer merges across the beginning of the turn, prompt and
answer are encoded by themselves, and a conversation of several turns becomes one sample per turn: the ids before a
trained turn are always the server's.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.data.chat_samples import Sample
from headway.data.tokenizer import TextTokenizer

Tokens = npt.NDArray[np.uint32]
Encode = Callable[[Sequence[str]], list[Tokens]]

_CACHED_CHARS = 64
_CACHED_TEXTS = 1 << 16
_LOCAL = {"ByteLevel", "Split", "Digits", "Whitespace", "WhitespaceSplit", "Punctuation", "BertPreTokenizer"}
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Replace"}


class EncodedSample(NamedTuple):
    """The ids of a sample and its spans."""

    ids: list[Tokens]
    """In parts, to be joined."""
    spans: list[tuple[int, int, int, bool]]
    """(start, end, role, trained) of each message, in tokens."""
    length: int


def added_pattern(tokenizer: TextTokenizer) -> re.Pattern[str] | None:
    """Return a pattern of the tokens at which a text can be cut; None if its parts depend on each other."""
    content = json.loads(tokenizer.raw.to_str())
    if not {step["type"] for step in _steps(content["normalizer"])} <= _NORMALIZERS:
        return None
    for step in _steps(content["pre_tokenizer"]):
        if step["type"] not in _LOCAL or step.get("add_prefix_space"):
            return None
    added = content["added_tokens"]
    if any(token[key] for token in added for key in ("lstrip", "rstrip", "single_word")):
        return None
    if any(token["normalized"] for token in added) and content["normalizer"] is not None:
        return None
    names = sorted((token["content"] for token in added), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, names))})") if names else None


def _steps(part: Any) -> list[dict[str, Any]]:
    if part is None:
        return []
    inner = part.get("pretokenizers", part.get("normalizers"))
    return [part] if part["type"] != "Sequence" else [step for nested in inner for step in _steps(nested)]


def end_pattern(tokenizer: TextTokenizer) -> re.Pattern[str] | None:
    """Return a pattern of an added token at the end of a text."""
    names = [token.content for token in tokenizer.raw.get_added_tokens_decoder().values()]
    return re.compile(f"(?:{'|'.join(map(re.escape, names))})\\Z") if names else None


@dataclass
class SampleEncoder:
    """Encodes batches of samples through `encode`, which encodes texts without added tokens to the tokenizer's ids."""

    tokenizer: TextTokenizer
    encode: Encode

    added: re.Pattern[str] | None = field(init=False)
    _cache: dict[str, Tokens] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.added = added_pattern(self.tokenizer)
        self._added_ids = {
            token.content: np.array([number], dtype=np.uint32)
            for number, token in self.tokenizer.raw.get_added_tokens_decoder().items()
        }

    def encode_all(self, samples: Iterable[Sample]) -> list[list[EncodedSample]]:
        """Return the encoded samples of each sample: one, unless its turns had to be separated."""
        parted = [_Parted(sample, self.added) for sample in samples]
        ids = self._ids(dict.fromkeys(text for entry in parted for text in entry.needed()))
        results: list[list[EncodedSample]] = []
        for entry in parted:
            encoded = entry.joined(ids, self._added_ids)
            results.append([encoded] if encoded is not None else self._separate(entry.sample))
        return results

    def _ids(self, texts: Mapping[str, None]) -> dict[str, Tokens]:
        """Return the ids of texts; short ones are kept for later batches."""
        cache = self._cache
        unknown = [text for text in texts if text not in cache]
        known = {text: cache[text] for text in texts if text in cache}
        encoded = self.encode(unknown) if unknown else []
        for text, ids in zip(unknown, encoded, strict=True):
            known[text] = ids
            if len(text) <= _CACHED_CHARS and len(cache) < _CACHED_TEXTS:
                cache[text] = ids
        return known

    def _separate(self, sample: Sample) -> list[EncodedSample]:
        """Encode each trained turn with all before it as its prompt, both as the server would."""
        results = []
        for index, piece in enumerate(sample):
            if not piece.trained:
                continue
            prompt = self.tokenizer.encode("".join(before.text for before in sample[:index]))
            rest = [piece]
            if index + 1 < len(sample) and not sample[index + 1].text.strip():
                rest.append(sample[index + 1])  # what the template writes after the end of turn
            answers = self.tokenizer.encode_batch([after.text for after in rest])
            role = sample[index - 1].role if index else piece.role
            turn = [(ids, piece.role, part.trained) for ids, part in zip(answers, rest, strict=True)]
            results.append(_assemble([(prompt, role, False), *turn]))
        return results


def _assemble(parts: Sequence[tuple[Tokens, int, bool]]) -> EncodedSample:
    spans, position = [], 0
    for ids, role, trained in parts:
        if len(ids):
            spans.append((position, position + len(ids), role, trained))
        position += len(ids)
    return EncodedSample([ids for ids, _, _ in parts], spans, position)


class _Parted:
    """A sample's text split at added tokens, and where its pieces end in these parts."""

    __slots__ = ("cuts", "parts", "sample")

    def __init__(self, sample: Sample, added: re.Pattern[str] | None) -> None:
        self.sample = sample
        text = "".join([piece.text for piece in sample])
        self.parts = [text] if added is None else added.split(text)
        """Text and added tokens, alternating."""
        self.cuts: list[tuple[int, str]] = []
        """(part, beginning of the part) where each piece but the last ends."""
        index, start, end = 0, 0, len(self.parts[0])
        position = 0
        for piece in sample[:-1]:
            position += len(piece.text)
            while position > end:
                index += 1
                start, end = end, end + len(self.parts[index])
            self.cuts.append((index, self.parts[index][: position - start]))

    def needed(self) -> Iterable[str]:
        """Texts without added tokens that must be encoded."""
        yield from (part for part in self.parts[::2] if part)
        yield from (left for index, left in self.cuts if index % 2 == 0 and left)

    def joined(self, ids: dict[str, Tokens], added: dict[str, Tokens]) -> EncodedSample | None:
        """Return the sample as the encoding of its whole text; None if a trained turn does not begin and end between
        two tokens. Other messages that do not are counted with the next one."""
        encoded: list[Tokens] = []
        starts, length = [], 0
        for index, part in enumerate(self.parts):
            starts.append(length)
            if part:
                tokens = added[part] if index % 2 else ids[part]
                encoded.append(tokens)
                length += len(tokens)
        spans: list[tuple[int, int, int, bool]] = []
        begin = 0
        sample = self.sample
        for index, piece in enumerate(sample):
            last = index == len(sample) - 1
            end = length if last else self._end(self.cuts[index], starts, ids)
            if end is None:
                if piece.trained or sample[index + 1].trained:
                    return None
                continue
            if end > begin:
                spans.append((begin, end, piece.role, piece.trained))
            elif piece.trained:
                return None
            begin = end
        return EncodedSample(encoded, spans, length)

    def _end(self, cut: tuple[int, str], starts: list[int], ids: dict[str, Tokens]) -> int | None:
        """Return the token at which a piece ends; None if a token crosses it."""
        index, left = cut
        part = self.parts[index]
        if not left:
            return starts[index]
        if index % 2:
            return starts[index] + 1 if len(left) == len(part) else None
        if len(left) == len(part):
            return starts[index] + len(ids[part])
        head, whole = ids[left], ids[part]
        if len(head) <= len(whole) and np.array_equal(whole[: len(head)], head):
            return starts[index] + len(head)
        return None
