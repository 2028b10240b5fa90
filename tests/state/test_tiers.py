import pytest

from headway.recipe import Checkpoint, Store
from headway.state.tiers import tiers_at, tiers_at_end

ALL = ("memory", "disk", "store")


def rules(disk, memory=0, store=None):
    uploads = None if store is None else Store(url="s3://bucket/runs", every_steps=store)
    return Checkpoint(every_steps=disk, memory_every_steps=memory, store=uploads)


@pytest.mark.parametrize(
    ("checkpoint", "want"),
    [
        (rules(0), {}),
        (rules("auto"), {}),
        (rules(4), {4: ("memory", "disk"), 8: ("memory", "disk"), 12: ("memory", "disk")}),
        (rules(0, memory=5), {5: ("memory",), 10: ("memory",)}),
        (rules("auto", memory=5), {5: ("memory",), 10: ("memory",)}),
        (rules(6, memory=4), {4: ("memory",), 6: ("memory", "disk"), 8: ("memory",), 12: ("memory", "disk")}),
        (rules(0, store=0), {}),
        (rules(0, store=6), {6: ("memory", "store"), 12: ("memory", "store")}),
        (rules(6, store=4), {4: ("memory", "store"), 6: ("memory", "disk"), 8: ("memory", "store"), 12: ALL}),
        (rules(4, memory=2, store=8), {2: ("memory",), 4: ("memory", "disk"), 6: ("memory",), 8: ALL,
                                       10: ("memory",), 12: ("memory", "disk")}),
    ],
)  # fmt: skip
def test_tiers_of_the_first_twelve_steps(checkpoint, want):
    assert {step: tiers for step in range(1, 13) if (tiers := tiers_at(checkpoint, step))} == want


def test_the_last_state_goes_to_every_configured_tier():
    assert tiers_at_end(rules(0)) == ("memory", "disk")
    assert tiers_at_end(rules("auto", memory=3)) == ("memory", "disk")
    assert tiers_at_end(rules(100, store=0)) == ALL
