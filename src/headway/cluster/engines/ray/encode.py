"""Text is encoded on the cores of a Ray cluster while it is read and written here: the same tokens, from more cores.

Tasks are given the tokenizer's JSON and lists of strings, and give bytes and numbers back. A task that is lost with its
node is done again by Ray.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.cluster.engines.ray.engine import RayEngine, connected, ray_errors
from headway.data import TextTokenizer
from headway.data.encoders import Encoders

__all__ = ["encode_there", "ray_encoders"]

BATCH_CHARS = 1 << 20
AHEAD_PER_CORE = 2
"""Batches under way for each core: one that is encoded, one that is on its way."""


def ray_encoders(
    engine: RayEngine, batch_chars: int = BATCH_CHARS
) -> Callable[[TextTokenizer], AbstractContextManager[Encoders]]:
    """Opens encoders on a cluster, for `build`."""
    return lambda tokenizer: _open(engine, tokenizer, batch_chars)


@contextmanager
def _open(engine: RayEngine, tokenizer: TextTokenizer, batch_chars: int) -> Iterator[Encoders]:
    ray = connected(engine)
    cores = sum(machine.cpus for machine in engine.inventory())
    with ray_errors(ray):
        pool = _Tasks(ray, tokenizer, batch_chars, cores)
    try:
        yield pool
    finally:
        pool.close()


class _Tasks(Encoders):
    """A task a batch, one core each."""

    def __init__(self, ray: Any, tokenizer: TextTokenizer, batch_chars: int, cores: int) -> None:
        self.batch_chars, self.ahead = batch_chars, max(1, AHEAD_PER_CORE * cores)
        self._ray, self._open = ray, set[Any]()
        self._tokenizer = ray.put(tokenizer.to_bytes())
        self._how = (tokenizer.end_of_text, not tokenizer.raw.encode_special_tokens)
        self._task = ray.remote(num_cpus=1)(encode_there)

    def submit(self, texts: list[str]) -> Callable[[], list[npt.NDArray[np.uint32]]]:
        """See Encoders."""
        asked = self._task.remote(self._tokenizer, *self._how, texts)
        self._open.add(asked)
        return lambda: self._tokens(asked)

    def _tokens(self, asked: Any) -> list[npt.NDArray[np.uint32]]:
        with ray_errors(self._ray):
            ids, lengths = self._ray.get(asked)
        self._open.discard(asked)
        whole = np.frombuffer(ids, dtype="<u4").astype(np.uint32, copy=False)
        return np.split(whole, np.cumsum(lengths)[:-1])

    def close(self) -> None:
        """Nothing goes on for somebody who has gone."""
        for asked in self._open:
            self._ray.cancel(asked)


def encode_there(content: bytes, end_of_text: int, special_tokens: bool, texts: list[str]) -> tuple[bytes, list[int]]:
    """What a task does: the tokens of all texts in one piece, and how many each has."""
    encoded = _tokenizer(content, end_of_text, special_tokens).encode_batch(texts)
    return b"".join(ids.astype("<u4").tobytes() for ids in encoded), [len(ids) for ids in encoded]


@functools.lru_cache(maxsize=1)
def _tokenizer(content: bytes, end_of_text: int, special_tokens: bool) -> TextTokenizer:
    """Read once a process, on one thread: the task has one core."""
    from headway.data.tokenizer import limit_threads, same_tokenizer

    limit_threads(1)
    return same_tokenizer(content, end_of_text, special_tokens=special_tokens)
