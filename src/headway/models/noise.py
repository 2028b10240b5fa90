"""Random numbers of diffusion: functions of a seed, a purpose and a sample's number, and of nothing else.

Each sample has a counter-based generator of its own (Philox), so that any split of a batch over workers, and any step
to resume at, sees the same numbers; they are drawn on the host, so that a CPU and a GPU see the same, too.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TRAINING, HELD_OUT, SAMPLING, STEP = "training", "held-out", "sampling", "step"
"""Purposes: samples of a run, held-out samples, first noise of generated samples, and noise of sampling steps."""


class Draw(NamedTuple):
    """The random numbers of some samples."""

    uniform_N: npt.NDArray[np.float64]
    """In (0, 1): where on the path they are."""
    drop_N: npt.NDArray[np.float64]
    """In (0, 1): the condition is dropped where it is below the share."""
    noise: npt.NDArray[np.float32]
    """[N, *shape], standard normal."""


def generator(seed: int, purpose: str, number: int) -> np.random.Generator:
    """Return the generator of a sample."""
    key = hashlib.sha256(f"headway-noise-1/{purpose}/{seed}".encode()).digest()[:16]
    # a draw increments the counter's lowest word, so that no two samples' sequences meet
    return np.random.Generator(
        np.random.Philox(key=np.frombuffer(key, dtype="<u8"), counter=[0, 0, number & (2**64 - 1), 0])
    )


def draw(seed: int, purpose: str, numbers: Sequence[int], shape: tuple[int, ...]) -> Draw:
    """Return the random numbers of samples of a shape; time and dropout do not depend on the shape."""
    uniform_N, drop_N = np.empty(len(numbers)), np.empty(len(numbers))
    noise = np.empty((len(numbers), *shape), dtype=np.float32)
    for row, number in enumerate(numbers):
        source = generator(seed, purpose, number)
        uniform_N[row], drop_N[row] = (source.integers(1, 2**53, 2) / 2**53).tolist()
        source.standard_normal(dtype=np.float32, out=noise[row])
    return Draw(uniform_N, drop_N, noise)
