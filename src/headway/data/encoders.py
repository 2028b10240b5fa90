"""Where batches of text are encoded while others are read and written: native threads here, or somewhere else.

Tokens do not depend on it: a batch is a list of texts, each encoded by itself, and batches come back in their order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

__all__ = ["Encode", "Encoders", "on_threads"]

Encode = Callable[[Sequence[str]], list[npt.NDArray[np.uint32]]]


class Encoders(ABC):
    """Encodes batches, so many at a time."""

    batch_chars: int
    """The size of a batch, about."""
    ahead: int
    """Batches under way while another is written."""

    @abstractmethod
    def submit(self, texts: list[str]) -> Callable[[], list[npt.NDArray[np.uint32]]]:
        """Have texts encoded; what is returned waits for their tokens."""


class _OneThread(Encoders):
    """One batch at a time, on as many native threads as the library takes."""

    ahead = 1

    def __init__(self, encode: Encode, pool: ThreadPoolExecutor, batch_chars: int) -> None:
        self.batch_chars = batch_chars
        self._encode, self._pool = encode, pool

    def submit(self, texts: list[str]) -> Callable[[], list[npt.NDArray[np.uint32]]]:
        """See Encoders."""
        return self._pool.submit(self._encode, texts).result


@contextmanager
def on_threads(encode: Encode, batch_chars: int) -> Iterator[Encoders]:
    """Encode in this process, beside whatever it does."""
    with ThreadPoolExecutor(1) as pool:
        yield _OneThread(encode, pool, batch_chars)
