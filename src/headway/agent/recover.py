"""Something broke: how a run goes on. Pure; the agent gathers the situation and carries the answer out.

What is here covers one machine and workers that died: the newest state that can be had, the memory's before the
disk's, and an end to it when nothing gets better.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Recovery", "Situation", "recover"]

Cause = Literal["died", "damaged", "other"]


@dataclass(frozen=True)
class Situation:
    """What is known when an attempt has failed."""

    cause: Cause
    """A worker died of a signal, the state to go on from was damaged, or anything else: an error of the code, say."""
    what: str
    """What happened, in words."""
    restarts_left: int
    """How often it may still be started again without progress."""
    memory_step: int | None
    """Step of the state in the agent's memory, if there is a whole one."""
    disk_steps: tuple[int, ...]
    """Steps of the checkpoints that are not known to be damaged."""
    store_steps: tuple[int, ...] = ()
    """The same of the object store, where the disk has none."""
    can_start_over: bool = True
    """Whether what this agent began from is still there."""


@dataclass(frozen=True)
class Recovery:
    """What to do, and why."""

    action: Literal["stop", "restart"]
    source: Literal["memory", "disk", "store", "start"]
    step: int
    reason: str


def recover(situation: Situation) -> Recovery:
    """The cheapest safe way on."""
    if situation.cause == "other":
        return Recovery("stop", "start", 0, f"{situation.what}: starting again would not mend it")
    if situation.cause == "died" and situation.restarts_left <= 0:
        return Recovery("stop", "start", 0, f"{situation.what}, and again without any progress")
    memory = -1 if situation.memory_step is None else situation.memory_step
    disk, store = max(situation.disk_steps, default=-1), max(situation.store_steps, default=-1)
    if memory >= 0 and memory >= max(disk, store):
        return Recovery("restart", "memory", memory, f"{situation.what}; back to step {memory}, from memory")
    if disk >= 0 and disk >= store:
        return Recovery("restart", "disk", disk, f"{situation.what}; back to step {disk}, from disk")
    if store >= 0:
        return Recovery("restart", "store", store, f"{situation.what}; back to step {store}, from the object store")
    if situation.can_start_over:
        return Recovery("restart", "start", 0, f"{situation.what}; nothing was saved since, back to the beginning")
    return Recovery("stop", "start", 0, f"{situation.what}, and no state is left to go on from")
