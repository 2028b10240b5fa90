"""One operation at one shape, in several ways, and the least it could cost."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """The ways do the same on the same tensors; each call is one measurement."""

    operation: str
    shape: str
    """For people: "16384 x 2048 bf16, forward"."""
    ways: dict[str, Callable[[], object]]
    """By who does it: "headway" first, then "eager", "compiled", "liger"; a peer that is not installed is left out."""
    bytes: int = 0
    """That must be read and written at least once."""
    flops: int = 0
    """Of matrix products that it contains, in bfloat16."""
