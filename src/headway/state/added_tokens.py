"""A Hugging Face folder with more tokens: a longer tokenizer, more rows of embedding and head, maybe a chat template.

A new row is the mean of all rows that the tokenizer used before, so that a new token is as likely as an average one.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from headway.errors import DataError, ModelError
from headway.recipe.huggingface import read_model
from headway.state.hf_sidecars import CONFIG, TOKEN_FILES
from headway.state.huggingface import LazyWeight, Progress, TokenizerFile, stored_weights, write_folder

ROWS = ("embed.weight", "head.weight")
"""Tensors with one row per token."""
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"


def add_tokens(
    folder: Path, out: Path, tokens: Sequence[str], template: str | None = None, progress: Progress | None = None
) -> list[int]:
    """Write a copy of a folder with these special tokens; return their ids."""
    from tokenizers import AddedToken, Tokenizer

    if not (folder / TOKENIZER).is_file():
        raise DataError(f"{folder} has no {TOKENIZER}", hint="name a Hugging Face folder with one")
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    _check_new(tokens, tokenizer.token_to_id, folder)
    before = tokenizer.get_vocab_size(with_added_tokens=True)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    ids = [int(tokenizer.token_to_id(token) or 0) for token in tokens]
    model = read_model(folder)
    vocabulary = max(model.vocabulary, *(number + 1 for number in ids))
    weights = {
        name: _with_rows(weight, vocabulary, min(before, model.vocabulary)) if name in ROWS else weight
        for name, weight in stored_weights(folder, model).items()
    }
    config = json.loads((folder / CONFIG).read_bytes())
    with tempfile.TemporaryDirectory() as temporary:
        sidecars = Path(temporary)
        for name in (CONFIG, *TOKEN_FILES):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, sidecars / name)
        if template is not None:
            (sidecars / TEMPLATE).write_text(template)
        tokenizer.save(str(sidecars / TOKENIZER))
        end = config.get("eos_token_id")
        file = TokenizerFile(sidecars / TOKENIZER, end if isinstance(end, int) else None)
        seq = config.get("max_position_embeddings") or 2048
        larger = model.model_copy(update={"vocab_size": vocabulary})
        write_folder(out, larger, weights, tokenizer=file, sidecars=sidecars, seq=seq, progress=progress)
    return ids


def _check_new(tokens: Sequence[str], id_of: Callable[[str], int | None], folder: Path) -> None:
    """Raise DataError for a token that cannot be added."""
    for place, token in enumerate(tokens):
        if not token.strip():
            raise DataError(f"token {place + 1}, {token!r}, is empty or white space", hint="for example '<|im_end|>'")
        if token in tokens[:place]:
            raise DataError(f"the token {token!r} is named twice", hint="name each once")
        if (number := id_of(token)) is not None:
            raise DataError(f"{folder} has the token {token!r} already: it is {number}", hint="leave it out")


def _with_rows(weight: LazyWeight, rows: int, used: int) -> LazyWeight:
    """Return a matrix with more rows, each the mean of the first `used`; rows from `used` on are overwritten too."""
    if rows <= weight.shape[0] and rows <= used:
        return weight

    def blocks() -> Iterator[memoryview]:
        values = _floats(weight.blocks(), weight.dtype).reshape(weight.shape)
        larger = np.empty((max(rows, weight.shape[0]), *weight.shape[1:]), dtype=np.float32)
        larger[: len(values)] = values
        larger[used:rows] = values[:used].astype(np.float64).mean(axis=0)
        yield _bits(larger, weight.dtype).data.cast("B")

    return replace(weight, shape=(max(rows, weight.shape[0]), *weight.shape[1:]), blocks=blocks, slice_at=None)


def _floats(blocks: Iterable[memoryview], dtype: str) -> np.ndarray:
    content = b"".join(bytes(block) for block in blocks)
    if dtype == "bfloat16":
        return (np.frombuffer(content, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in ("float32", "float16"):
        return np.frombuffer(content, dtype=f"<f{4 if dtype == 'float32' else 2}").astype(np.float32)
    raise ModelError(f"weights in {dtype} cannot have tokens added", hint="convert them to bfloat16 or float32 first")


def _bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round to a dtype; bfloat16 to the nearest even."""
    if dtype != "bfloat16":
        return values.astype("<f4" if dtype == "float32" else "<f2")
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
