"""Encode batches of text in the background while others are read and written: on native threads, or on other machines.

Tokens do not depend on it: each text of a batch is encoded by itself, and batches keep their order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

Encode = Callable[[Sequence[str]], list[npt.NDArray[np.uint32]]]


class Encoders(ABC):
    """Encodes several batches at a time."""

    batch_chars: int
    """Approximate size of a batch."""
    ahead: int
    """Batches in progress while another is written."""

    @abstractmethod
    def submit(self, texts: list[str]) -> Callable[[], list[npt.NDArray[np.uint32]]]:
        """Start encoding texts; the returned function waits for their tokens."""


class _OneThread(Encoders):
    """One batch at a time, on as many native threads as the library uses."""

    ahead = 1

    def __init__(self, encode: Encode, pool: ThreadPoolExecutor, batch_chars: int) -> None:
        self.batch_chars = batch_chars
        self._encode, self._pool = encode, pool

    def submit(self, texts: list[str]) -> Callable[[], list[npt.NDArray[np.uint32]]]:
        """See Encoders."""
        return self._pool.submit(self._encode, texts).result


@contextmanager
def on_threads(encode: Encode, batch_chars: int) -> Iterator[Encoders]:
    """Encode in a background thread of this process."""
    with ThreadPoolExecutor(1) as pool:
        yield _OneThread(encode, pool, batch_chars)
