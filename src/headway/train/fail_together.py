"""Stages that all workers leave well, or all leave by an exception."""

import contextlib
from collections.abc import Iterator

from headway.errors import HeadwayError, StateError
from headway.parallel import World

__all__ = ["PeerFailed", "fail_together"]


class PeerFailed(HeadwayError):
    """Another worker failed and tells why; this one only stops with it."""


@contextlib.contextmanager
def fail_together(world: World, stage: str) -> Iterator[None]:
    """Do something with all workers; the one that fails leaves by its own exception, the others by PeerFailed."""
    failure: Exception | None = None
    try:
        yield
    except OSError as error:
        failure = StateError(f"cannot {stage}: {error.strerror}", hint="free some space, then headway resume goes on")
    except Exception as error:
        failure = error
    if world.any(failure is not None):
        raise failure or PeerFailed(f"another worker could not {stage}")
