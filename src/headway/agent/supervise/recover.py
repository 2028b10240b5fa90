"""Something broke or stalled: how a run goes on. `recover(situation, now) -> Recovery`, pure.

The agent gathers the situation and carries the answer out; chaos tests and simulations ask the same function. The
cheapest way that is safe, in this order:

    go on             nothing is lost: a worker that was only stopped is woken, one that moves again is left alone,
                      workers whose agent died are taken over by the next
    restart           from the newest state there is: the agent's memory, the disk, the object store, the beginning
    stop              what comes again at the same place will come again; no state is left; patience is used up
"""

from dataclasses import dataclass, field, replace
from typing import Literal

__all__ = [
    "SUSPECT",
    "Cause",
    "Failure",
    "NodeCapacity",
    "Recovery",
    "RecoveryRules",
    "RestorableSteps",
    "Situation",
    "recover",
]

Cause = Literal[
    "died", "lost", "room", "hung", "stopped", "raised", "not finite", "spike", "corrupted", "damaged", "agent died",
    "other",
]  # fmt: skip
"""A worker died; its whole node was lost; there is room for more workers than were left after that; it made no mark for
too long; was stopped by a signal; raised an error in the middle of training. The loss or the gradient's norm was no
number; the loss jumped. Replicas differ. The state to go on from is damaged. The agent itself died. Anything else,
which starting again would not mend: a mistake in the recipe, a disk that is full."""

Source = Literal["memory", "disk", "store", "start"]
LONGEST_PAUSE_S = 30.0
FIRST_PAUSE_S = 0.5
SUSPECT = 2
"""Attempts that fail in a row on one node, after which it gets no workers any more."""


@dataclass(frozen=True)
class Failure:
    """What happened to an attempt."""

    cause: Cause
    what: str
    """In words."""
    step: int = 0
    """The step under way."""
    reached: int = 0
    """The last step done and recorded, or kept in memory."""
    place: str = ""
    """Where in the code, or by what: the same again means the same fault."""
    rank: int | None = None
    at: float = 0.0
    """Seconds, on the clock of `now`."""
    window: tuple[int, int] | None = None
    """The samples of the step, for numbers that went wrong: first and end."""
    usual: float = 0.0
    spread: float = 0.0
    """What the loss was held against."""
    doubt: tuple[int, int, str, int] | None = None
    """Of replicas that differ: the step, a worker, a tensor and an element that shows it."""
    node: str = ""
    """Where it happened, of a run on several nodes."""


@dataclass(frozen=True)
class RecoveryRules:
    """What the recipe says."""

    restarts: int = 3
    if_not_finite: Literal["stop", "skip", "lower-rate"] = "stop"
    if_spike: Literal["go-on", "stop", "skip", "lower-rate"] = "go-on"
    rate_factor: float = 0.5


@dataclass(frozen=True)
class RestorableSteps:
    """Steps of the newest states that are whole as far as anybody knows; None where there is none."""

    memory: int | None = None
    disk: int | None = None
    store: int | None = None
    start: int | None = 0
    """Where the first attempt began; None if that is gone."""

    def newest(self) -> tuple[Source, int] | None:
        """The newest, the nearest of those that are equally new."""
        found: list[tuple[Source, int | None]] = [
            ("memory", self.memory), ("disk", self.disk), ("store", self.store), ("start", self.start)
        ]  # fmt: skip
        there = [(source, step) for source, step in found if step is not None]
        return max(there, key=lambda pair: pair[1]) if there else None


@dataclass(frozen=True)
class NodeCapacity:
    """What a run on several nodes could go on with."""

    workers: int
    """That it had."""
    able: tuple[tuple[str, int], ...]
    """Nodes that are there, and how many workers each has room for."""
    counts: tuple[int, ...]
    """Numbers of workers that its mesh and its batch can be shared out over, up to that which was asked for."""
    fewest: int = 1
    """It does not go on with fewer."""

    def most(self, without: str = "") -> int | None:
        """As many workers as there is room for; None where there is not for enough of them."""
        room = sum(slots for name, slots in self.able if name != without)
        return max((count for count in self.counts if self.fewest <= count <= room), default=None)


@dataclass(frozen=True)
class Situation:
    """What is known when something has gone wrong."""

    failure: Failure
    before: tuple[Failure, ...] = ()
    """Earlier ones since somebody started the run, the oldest first."""
    rules: RecoveryRules = field(default_factory=RecoveryRules)
    states: RestorableSteps = field(default_factory=RestorableSteps)
    workers_live: bool = False
    """Whether every worker is there and works, or would if it were woken."""
    places: NodeCapacity | None = None
    """Of a run on several nodes."""


@dataclass(frozen=True)
class Recovery:
    """What to do, and why."""

    action: Literal["go-on", "restart", "stop"]
    reason: str
    source: Source = "start"
    step: int = 0
    pause_s: float = 0.0
    """How long to wait before it."""
    wake: int | None = None
    """The worker to send SIGCONT to."""
    skip: tuple[int, int] | None = None
    """Samples that are passed over from now on."""
    cut: tuple[int, float] | None = None
    """From this step on the learning rate is multiplied by this."""
    judge: tuple[int, float, float] | None = None
    """The step to hold against these numbers when it is made again."""
    doubt: tuple[int, int, str, int] | None = None
    """What to look at again when the replay gets there, so that the replica at fault can be named."""
    accept: int | None = None
    """The step whose spike is taken as it is."""
    workers: int | None = None
    """With how many it goes on, where that is told."""
    avoid: str = ""
    """A node that gets no workers from now on."""


def recover(situation: Situation, now: float) -> Recovery:
    """The cheapest safe way on."""
    failure, what = situation.failure, situation.failure.what
    if failure.cause == "agent died":
        return _after_the_agent(situation, now)
    if failure.cause in ("stopped", "hung") and situation.workers_live:
        return _still_there(situation)
    if failure.cause == "other":
        return Recovery("stop", f"{what}: a restart would not help")
    if failure.cause == "raised" and _same_again(situation):
        return Recovery("stop", f"{what}: the same error at the same place a second time")
    if failure.cause in ("not finite", "spike") and _same_again(situation):
        return _numbers_again(situation, now)
    return _restart(situation, now)


def _restart(situation: Situation, now: float, **more: object) -> Recovery:
    failure, what = situation.failure, situation.failure.what
    bad = _bad_node(situation)
    tries = _without_progress(situation, bad)
    if failure.cause != "damaged" and tries >= situation.rules.restarts:
        again = ", and again without any progress" if situation.rules.restarts else ""
        return Recovery("stop", f"{what}{again}")
    newest = situation.states.newest()
    if newest is None:
        return Recovery("stop", f"{what}; no checkpoint or snapshot to resume from")
    source, step = newest
    where = {"memory": ", from memory", "disk": ", from disk", "store": ", from the object store", "start": ""}[source]
    back = f"back to step {step}{where}" if step or source != "start" else "nothing was saved since, back to the start"
    judge = (failure.step, failure.usual, failure.spread) if failure.cause == "spike" else None
    pause = _pause_s(tries, failure, now)
    later = f", after {pause:g} s" if pause else ""
    told = f"{what}; {back}{later}"
    workers = None
    if situation.places is not None:
        workers = situation.places.most(without=bad)
        told += f", without node {bad}, where {SUSPECT} attempts failed in a row" if bad else ""
        if workers is None and situation.places.fewest == 1:
            return Recovery("stop", f"{what}, and the nodes that are left have room for no worker")
        if workers is None:
            workers = situation.places.workers
            told += ", once there is a node in its place"
        if workers != situation.places.workers:
            one = "one worker" if workers == 1 else f"{workers} workers"
            told += f", with {one} instead of {situation.places.workers}"
    return Recovery(
        "restart",
        told,
        source,
        step,
        pause,
        judge=judge,
        doubt=failure.doubt,
        workers=workers,
        avoid=bad,
        **more,  # type: ignore[arg-type]
    )


def _after_the_agent(situation: Situation, now: float) -> Recovery:
    if situation.workers_live:
        return Recovery("go-on", f"{situation.failure.what}; a new agent took over its workers")
    return _restart(situation, now)


def _still_there(situation: Situation) -> Recovery:
    failure = situation.failure
    if failure.cause == "stopped":
        return Recovery("go-on", f"{failure.what}; continued with SIGCONT", wake=failure.rank)
    return Recovery("go-on", f"{failure.what}; it is making progress again")


def _numbers_again(situation: Situation, now: float) -> Recovery:
    """The numbers go wrong at the same place after everything was made again: it is no fluke of the machine."""
    failure, rules = situation.failure, situation.rules
    way = rules.if_spike if failure.cause == "spike" else rules.if_not_finite
    told = f"{failure.what}, again after a replay"
    if way == "stop":
        key = "health.if_spike" if failure.cause == "spike" else "health.if_not_finite"
        return Recovery("stop", f"{told}; {key} says to stop")
    again = _with_words(situation, told)
    if way == "skip" and failure.window is not None:
        first, end = failure.window
        again = _with_words(situation, f"{told}; samples {first} to {end - 1} are passed over")
        return _restart(again, now, skip=failure.window)
    if way == "lower-rate":
        again = _with_words(situation, f"{told}; the learning rate is multiplied by {rules.rate_factor:g}")
        return _restart(again, now, cut=(failure.step, rules.rate_factor))
    return _restart(_with_words(situation, f"{told}; taken as it is"), now, accept=failure.step)


def _with_words(situation: Situation, what: str) -> Situation:
    return replace(situation, failure=replace(situation.failure, what=what))


def _same_again(situation: Situation) -> bool:
    """Whether the failure before was the same one: same cause, step and place."""
    if not situation.before:
        return False
    now, last = situation.failure, situation.before[-1]
    return (now.cause, now.step, now.place, now.window) == (last.cause, last.step, last.place, last.window)


def _since_progress(situation: Situation) -> list[Failure]:
    """The failure with which the run last got further than ever before, and those after it."""
    furthest, found = -1, list[Failure]()
    for failure in (*situation.before, situation.failure):
        if failure.reached > furthest:
            furthest, found = failure.reached, []
        found.append(failure)
    return found


def _without_progress(situation: Situation, bad: str = "") -> int:
    """How many failures there were since the run last got further than ever before, but for those of a bad node."""
    after = _since_progress(situation)[1:]
    return sum(failure.cause not in ("damaged", "room") and not (bad and failure.node == bad) for failure in after)


def _bad_node(situation: Situation) -> str:
    """The node where the last few attempts failed one after the other, if the run can do without it."""
    last = _since_progress(situation)[-SUSPECT:]
    nodes, node, places = {failure.node for failure in last}, situation.failure.node, situation.places
    if places is None or not node or len(last) < SUSPECT or len(nodes) > 1:
        return ""
    return node if node in dict(places.able) and places.most(node) else ""


def _pause_s(tries: int, failure: Failure, now: float) -> float:
    """Longer and longer as long as nothing gets better, less what has passed since."""
    if not tries:
        return 0.0
    return max(0.0, round(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (tries - 1)) - (now - failure.at), 2))
