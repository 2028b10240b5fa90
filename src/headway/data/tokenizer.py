"""Text to token ids and back, with a byte-level BPE trained here or any tokenizer.json.

Text is only text: a document that contains `<|endoftext|>` gets the tokens of those characters, and the special id
only ends documents, unless special tokens are to be parsed in text.
"""

import atexit
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.sources import TextBlock
from headway.errors import INTERRUPTED, DataError

END_OF_TEXT = "<|endoftext|>"
"""The token that ends a document, in tokenizers trained here."""

_USUAL_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<EOS>",
    "[EOS]",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
)

SMALLEST_VOCABULARY = 257
"""256 bytes and the end of text."""


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the id that ends a document."""

    raw: Any
    """The `tokenizers.Tokenizer` behind it."""
    end_of_text: int

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; ids may have gaps."""
        return int(max(self.raw.get_vocab(with_added_tokens=True).values())) + 1

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Encode one text, without an end of text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Encode texts in parallel, on native threads."""
        encodings = self.raw.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Decode token ids to text; special tokens are included unless they are skipped."""
        return str(self.raw.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    def separable(self, left: str, right: str) -> bool:
        """Whether two texts get the same tokens separately as together."""
        encodings = self.raw.encode_batch([left + right, left, right], add_special_tokens=False)
        joined, first, second = (encoding.ids for encoding in encodings)
        return bool(joined == first + second)

    def to_bytes(self) -> bytes:
        """The content of tokenizer.json."""
        return str(self.raw.to_str(pretty=True)).encode() + b"\n"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE; the result does not depend on the number of threads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small",
            hint=f"use at least {SMALLEST_VOCABULARY}: 256 bytes and the end of text",
        )
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _train(raw, texts, trainer)
    raw.encode_special_tokens = True
    end_of_text = raw.token_to_id(END_OF_TEXT)
    assert end_of_text is not None, "it is one of the trainer's special tokens"
    return TextTokenizer(raw, end_of_text)


def _train(raw: Any, texts: Iterable[str], trainer: Any) -> None:
    """Train in a thread: Ctrl-C, which Python sees only between its own instructions, need not wait for the end."""
    errors: list[BaseException] = []
    ended = threading.Event()  # a join that Ctrl-C interrupts takes its thread for ended (Python 3.11)

    def train() -> None:
        try:
            raw.train_from_iterator(texts, trainer)
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    try:
        threading.Thread(target=train, daemon=True).start()
        ended.wait()
    except KeyboardInterrupt:
        atexit.register(_exit_beside, ended)
        raise
    if errors:
        raise errors[0]


def _exit_beside(ended: threading.Event) -> None:
    """End an interrupted process whose thread is not in Python: the interpreter cannot end beside it."""
    if not ended.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)


def load_tokenizer(
    path: str | Path, *, end_of_text: str | int | None = None, special_tokens: bool = False
) -> TextTokenizer:
    """Load a tokenizer.json, or a folder that has one.

    `end_of_text` is the name or id of the token that ends a document, if it has an unusual name. With
    `special_tokens`, special tokens in a text become their ids instead of being encoded as plain text.
    """
    from tokenizers import Tokenizer

    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise DataError(f"no tokenizer at {path}", hint="name a tokenizer.json, or a folder with one")
    try:
        raw = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file} is not a tokenizer: {error}", hint="it must be a `tokenizers` JSON file") from None
    raw.no_truncation()
    raw.no_padding()
    raw.encode_special_tokens = not special_tokens
    if not isinstance(end_of_text, int):
        end_of_text = _find_end_of_text(raw, file, end_of_text)
    return TextTokenizer(raw, end_of_text)


def tokenizer_from_bytes(content: bytes, end_of_text: int, *, special_tokens: bool) -> TextTokenizer:
    """Restore a tokenizer from its `to_bytes`, for example on another machine."""
    from tokenizers import Tokenizer

    raw = Tokenizer.from_str(content.decode())
    raw.encode_special_tokens = not special_tokens
    return TextTokenizer(raw, end_of_text)


def _find_end_of_text(raw: Any, file: Path, name: str | None) -> int:
    for candidate in _USUAL_NAMES if name is None else (name,):
        token_id = raw.token_to_id(candidate)
        if token_id is not None:
            return int(token_id)
    special = [token.content for token in raw.get_added_tokens_decoder().values() if token.special]
    listed = ", ".join(special[:12]) or "none"
    missing = "no end-of-text token with a usual name" if name is None else f"no token {name!r}"
    raise DataError(f"{file} has {missing}", hint=f"name it with --end-of-text; its special tokens: {listed}")


# Between the end of a line and the next word, or before a single space: positions where the usual pre-tokenizers split
# anyway. Runs of white space are not cut, since their split depends on what follows.
_CANDIDATE = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")
_CONTEXT_CHARS = 128
_TRIES = 32


def cut_blocks(
    blocks: Iterable[TextBlock], separable: Callable[[str, str], bool], *, size: int, limit: int
) -> Iterator[TextBlock]:
    """Cut long texts into blocks of about `size` characters that get the same tokens as the whole text.

    The encoder needs some 100 bytes per token, so it cannot encode a long document at once. A cut is made only where
    the text around it passes `separable`; text without such a position is cut at `limit` characters.
    """
    pending = ""
    scanned = tries = 0
    for block in blocks:
        pending += block.text
        start = 0
        while len(pending) - start > size + _CONTEXT_CHARS:
            at, scanned, tries = _next_cut(pending, start, max(scanned, start + size), tries, separable)
            if at is None:
                if len(pending) - start <= limit:
                    break
                at = start + limit
            yield block._replace(text=pending[start:at], last=False)
            start, scanned, tries = at, 0, 0
        if block.prompt or block.last:
            yield block._replace(text=pending[start:])
            pending, scanned, tries = "", 0, 0
        elif start:
            pending, scanned = pending[start:], max(scanned - start, 0)


def _next_cut(
    text: str, start: int, scanned: int, tries: int, separable: Callable[[str, str], bool]
) -> tuple[int | None, int, int]:
    """Return (where to cut or None, how far the text was searched, how many positions were tried)."""
    end = len(text) - _CONTEXT_CHARS
    if tries >= _TRIES:
        return None, end, tries
    for match in _CANDIDATE.finditer(text, scanned, end):
        at = match.start()
        if separable(text[max(start, at - _CONTEXT_CHARS) : at], text[at : at + _CONTEXT_CHARS]):
            return at, at, 0
        tries += 1
        if tries >= _TRIES:
            break
    return None, end, tries


def limit_threads(threads: int) -> None:
    """Use at most so many native threads; must be called before this process first encodes."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
