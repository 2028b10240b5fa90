"""Tokenize text on the cores of a Ray cluster while this process reads and writes: the same tokens, from more cores.

Tasks receive the tokenizer's JSON and lists of strings, and return bytes and numbers. Ray repeats tasks that are lost
with their node.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.cluster.engines.ray.engine import RayEngine, ray_errors
from headway.data import TextTokenizer
from headway.data.encoders import Encoders

BATCH_CHARS = 1 << 20
AHEAD_PER_CORE = 2
"""Batches in flight per core: one being encoded, one on its way."""


def ray_encoders(
    engine: RayEngine, batch_chars: int = BATCH_CHARS
) -> Callable[[TextTokenizer], AbstractContextManager[Encoders]]:
    """Encoders on a cluster, for `build`."""
    return lambda tokenizer: _open(engine, tokenizer, batch_chars)


@contextmanager
def _open(engine: RayEngine, tokenizer: TextTokenizer, batch_chars: int) -> Iterator[Encoders]:
    ray = engine.connect(start=True)
    cores = sum(machine.cpus for machine in engine.inventory())
    with ray_errors(ray):
        pool = _RayEncoders(ray, tokenizer, batch_chars, cores)
    try:
        yield pool
    finally:
        pool.close()


class _RayEncoders(Encoders):
    """One task per batch, one core per task."""

    def __init__(self, ray: Any, tokenizer: TextTokenizer, batch_chars: int, cores: int) -> None:
        self.batch_chars, self.ahead = batch_chars, max(1, AHEAD_PER_CORE * cores)
        self._ray, self._pending = ray, set[Any]()
        self._tokenizer = ray.put(tokenizer.to_bytes())
        self._options = (tokenizer.end_of_text, not tokenizer.raw.encode_special_tokens)
        self._task = ray.remote(num_cpus=1)(encode_texts)

    def submit(self, texts: list[str]) -> Callable[[], list[npt.NDArray[np.uint32]]]:
        """See Encoders."""
        task = self._task.remote(self._tokenizer, *self._options, texts)
        self._pending.add(task)
        return lambda: self._tokens(task)

    def _tokens(self, task: Any) -> list[npt.NDArray[np.uint32]]:
        with ray_errors(self._ray):
            ids, lengths = self._ray.get(task)
        self._pending.discard(task)
        tokens = np.frombuffer(ids, dtype="<u4").astype(np.uint32, copy=False)
        return np.split(tokens, np.cumsum(lengths)[:-1])

    def close(self) -> None:
        """Cancel tasks whose results are no longer needed."""
        for task in self._pending:
            self._ray.cancel(task)


def encode_texts(content: bytes, end_of_text: int, special_tokens: bool, texts: list[str]) -> tuple[bytes, list[int]]:
    """The task: return the tokens of all texts, concatenated, and the number of each."""
    encoded = _tokenizer(content, end_of_text, special_tokens).encode_batch(texts)
    return b"".join(ids.astype("<u4").tobytes() for ids in encoded), [len(ids) for ids in encoded]


@functools.lru_cache(maxsize=1)
def _tokenizer(content: bytes, end_of_text: int, special_tokens: bool) -> TextTokenizer:
    """Parsed once per process, with one thread: the task has one core."""
    from headway.data.tokenizer import limit_threads, tokenizer_from_bytes

    limit_threads(1)
    return tokenizer_from_bytes(content, end_of_text, special_tokens=special_tokens)
