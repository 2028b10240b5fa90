"""Where a state goes: the agent's memory, the disk, an object store. Pure; the trainer and the agent both ask here."""

from typing import Literal

from headway.recipe import Checkpoint

__all__ = ["Tier", "tiers_at", "tiers_at_end"]

Tier = Literal["memory", "disk", "store"]


def tiers_at(checkpoint: Checkpoint, step: int, asked: bool = False) -> tuple[Tier, ...]:
    """The tiers that a step's state is due for, the disk if `asked`; none for most steps.

    All that is saved passes through memory.
    """
    every = {
        "disk": 0 if checkpoint.every_steps == "auto" else checkpoint.every_steps,
        "store": checkpoint.store.every_steps if checkpoint.store else 0,
        "memory": checkpoint.memory_every_steps,
    }
    due = {tier for tier, steps in every.items() if steps and step % steps == 0} | ({"disk"} if asked else set())
    return _ordered(due | {"memory"}) if due else ()


def tiers_at_end(checkpoint: Checkpoint) -> tuple[Tier, ...]:
    """The tiers that a run's last state goes to, and the state of one that is stopped."""
    return _ordered({"memory", "disk", "store"} if checkpoint.store else {"memory", "disk"})


def _ordered(tiers: set[str]) -> tuple[Tier, ...]:
    order: tuple[Tier, ...] = ("memory", "disk", "store")
    return tuple(tier for tier in order if tier in tiers)
