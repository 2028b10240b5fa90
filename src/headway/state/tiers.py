"""Which tiers a step's state is saved to: the agent's memory, the disk, an object store. Pure."""

from typing import Literal

from headway.recipe import Checkpoint

Tier = Literal["memory", "disk", "store"]


def tiers_at(checkpoint: Checkpoint, step: int, requested: bool = False) -> tuple[Tier, ...]:
    """Return the tiers that a step's state is due for, the disk included if `requested`; none for most steps.

    Every save goes through memory.
    """
    every = {
        "disk": 0 if checkpoint.every_steps == "auto" else checkpoint.every_steps,
        "store": checkpoint.store.every_steps if checkpoint.store else 0,
        "memory": checkpoint.memory_every_steps,
    }
    due = {tier for tier, steps in every.items() if steps and step % steps == 0} | ({"disk"} if requested else set())
    return _ordered(due | {"memory"}) if due else ()


def tiers_at_end(checkpoint: Checkpoint) -> tuple[Tier, ...]:
    """Return the tiers for the last state of a run that finishes or is stopped."""
    return _ordered({"memory", "disk", "store"} if checkpoint.store else {"memory", "disk"})


def _ordered(tiers: set[str]) -> tuple[Tier, ...]:
    order: tuple[Tier, ...] = ("memory", "disk", "store")
    return tuple(tier for tier in order if tier in tiers)
