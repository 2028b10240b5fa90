"""Collections while passes follow each other."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from headway.frozen_heap import frozen_heap


class Node:
    """Garbage, if it refers to itself and nobody else does."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def not_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_exists_before_is_not_scanned_and_what_is_made_meanwhile_is_collected() -> None:
    before = Node()
    earlier = weakref.ref(before)
    with frozen_heap():
        assert not any(thing is earlier() for thing in gc.get_objects())
        later = weakref.ref(Node())
        del before
        gc.collect()
        assert later() is None
        assert earlier() is not None
    gc.collect()
    assert earlier() is None


def test_a_heap_that_was_frozen_before_stays_frozen() -> None:
    gc.freeze()
    with frozen_heap(), frozen_heap():
        pass
    assert gc.get_freeze_count() > 0


def test_it_is_thawed_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), frozen_heap():
        1 / 0  # noqa: B018
    assert gc.get_freeze_count() == 0


def test_full_collections_can_be_rare_meanwhile() -> None:
    thresholds = gc.get_threshold()
    with frozen_heap(full_every=1000):
        assert gc.get_threshold() == (*thresholds[:2], 1000)
    assert gc.get_threshold() == thresholds
