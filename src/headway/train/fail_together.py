"""Collective stages that all workers complete, or all leave with an exception."""

import contextlib
from collections.abc import Iterator

from headway.errors import HeadwayError, StateError
from headway.parallel import World


class PeerFailed(HeadwayError):
    """Another worker failed and reports why; this one stops with it."""


@contextlib.contextmanager
def fail_together(world: World, stage: str) -> Iterator[None]:
    """Run a stage on all workers; if one fails, it raises its own exception, and the others PeerFailed."""
    failure: Exception | None = None
    try:
        yield
    except OSError as error:
        failure = StateError(f"cannot {stage}: {error.strerror}", hint="free some space, then headway resume")
    except Exception as error:
        failure = error
    if world.any(failure is not None):
        raise failure or PeerFailed(f"another worker could not {stage}")
