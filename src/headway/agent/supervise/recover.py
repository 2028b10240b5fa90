"""Decides how a run recovers after a failure or a stall: `recover(situation, now) -> Recovery`, pure.

The agent gathers the situation and applies the decision; chaos tests and simulations call the same function. It picks
the cheapest safe action:

    go on      nothing is lost: a stopped worker is continued, one that makes progress again is left alone, workers of a
               dead agent are taken over by the next
    restart    from the newest state: the agent's memory, the disk, the object store, the beginning
    stop       the failure would repeat, no state is left, or too many restarts made no progress
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Cause = Literal[
    "died", "lost", "room", "left", "hung", "stopped", "raised", "not finite", "spike", "corrupted", "damaged",
    "agent died", "other",
]  # fmt: skip
"""died: a worker exited. lost: its whole node did. room: nodes for more workers joined. left: a node leaves because it
was asked to. hung: no heartbeat for too long. stopped: by a signal. raised: an exception during training. not finite,
spike: of the loss or the gradient norm. corrupted: replicas differ. damaged: the state to resume from is. other: a
restart would not help, for example a mistake in the recipe or a full disk."""

Source = Literal["memory", "disk", "store", "start"]
LONGEST_PAUSE_S = 30.0
FIRST_PAUSE_S = 0.5
SUSPECT = 2
"""Consecutive failed attempts on one node after which it gets no more workers."""


@dataclass(frozen=True)
class Failure:
    """What happened to an attempt."""

    cause: Cause
    what: str
    """In words."""
    step: int = 0
    """The step under way."""
    reached: int = 0
    """The last step recorded, or held in memory."""
    place: str = ""
    """File and line, signal, phase or address; the same again means the same fault."""
    rank: int | None = None
    at: float = 0.0
    """Seconds, on the clock of `now`."""
    window: tuple[int, int] | None = None
    """Samples of the step with bad numbers: first and end."""
    usual: float = 0.0
    spread: float = 0.0
    """What the loss was compared with."""
    doubt: tuple[int, int, str, int] | None = None
    """Where replicas differ: step, rank, tensor and element."""
    node: str = ""
    """Where it happened, in a run on several nodes."""


@dataclass(frozen=True)
class RecoveryRules:
    """Recovery settings of the recipe."""

    restarts: int = 3
    if_not_finite: Literal["stop", "skip", "lower-rate"] = "stop"
    if_spike: Literal["go-on", "stop", "skip", "lower-rate"] = "go-on"
    rate_factor: float = 0.5


@dataclass(frozen=True)
class RestorableSteps:
    """Steps of the newest states not known to be damaged; None where there is none."""

    memory: int | None = None
    disk: int | None = None
    store: int | None = None
    start: int | None = 0
    """Where the first attempt began; None if that is gone."""

    def newest(self) -> tuple[Source, int] | None:
        """The newest; of equally new ones the fastest to read."""
        steps: dict[Source, int | None] = {
            "memory": self.memory, "disk": self.disk, "store": self.store, "start": self.start
        }  # fmt: skip
        known = [(source, step) for source, step in steps.items() if step is not None]
        return max(known, key=lambda pair: pair[1], default=None)


@dataclass(frozen=True)
class NodeCapacity:
    """What a run on several nodes could resume with."""

    workers: int
    """How many it had."""
    slots: tuple[tuple[str, int], ...]
    """Available nodes, and how many workers fit on each."""
    counts: tuple[int, ...]
    """Worker counts that its mesh and batch allow, up to the requested one."""
    fewest: int = 1
    """It does not resume with fewer."""

    def most_workers(self, without: str = "") -> int | None:
        """The most workers that fit; None if too few do."""
        room = sum(slots for name, slots in self.slots if name != without)
        return max((count for count in self.counts if self.fewest <= count <= room), default=None)


@dataclass(frozen=True)
class Situation:
    """What is known after a failure."""

    failure: Failure
    before: tuple[Failure, ...] = ()
    """Earlier failures since the run was started or resumed by a user, oldest first."""
    rules: RecoveryRules = field(default_factory=RecoveryRules)
    states: RestorableSteps = field(default_factory=RestorableSteps)
    workers_live: bool = False
    """Whether every worker is alive and works, or would once continued."""
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
    continue_rank: int | None = None
    """The worker to send SIGCONT to."""
    skip: tuple[int, int] | None = None
    """Samples to skip from now on."""
    cut: tuple[int, float] | None = None
    """From this step on, multiply the learning rate by this."""
    judge: tuple[int, float, float] | None = None
    """The step to compare with these numbers when it is replayed."""
    doubt: tuple[int, int, str, int] | None = None
    """What to check again during the replay, to identify the faulty replica."""
    accept: int | None = None
    """The step whose spike is accepted."""
    workers: int | None = None
    """Number of workers, if that is known."""
    avoid: str = ""
    """A node that gets no workers from now on."""


def recover(situation: Situation, now: float) -> Recovery:
    """Choose the cheapest safe action."""
    failure, what = situation.failure, situation.failure.what
    if situation.workers_live and failure.cause == "agent died":
        return Recovery("go-on", f"{what}; a new agent took over its workers")
    if situation.workers_live and failure.cause == "stopped":
        return Recovery("go-on", f"{what}; continued with SIGCONT", continue_rank=failure.rank)
    if situation.workers_live and failure.cause == "hung":
        return Recovery("go-on", f"{what}; it is making progress again")
    if failure.cause == "other":
        return Recovery("stop", f"{what}: a restart would not help")
    if failure.cause == "raised" and _is_repeated(situation):
        return Recovery("stop", f"{what}: the same error at the same place a second time")
    if failure.cause in ("not finite", "spike") and _is_repeated(situation):
        return _after_replay(situation, now)
    return _restart(situation, now)


def _restart(situation: Situation, now: float, **more: Any) -> Recovery:
    failure, what = situation.failure, situation.failure.what
    bad_node = _bad_node(situation)
    tries = _without_progress(situation, bad_node)
    restarts = situation.rules.restarts
    if failure.cause not in ("damaged", "left") and tries >= restarts:
        count = f"; no progress in {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
        return Recovery("stop", f"{what}{count}")
    newest = situation.states.newest()
    if newest is None:
        return Recovery("stop", f"{what}; no checkpoint or snapshot to resume from")
    source, step = newest
    tier = {"memory": " (memory)", "disk": " (disk)", "store": " (object store)", "start": ""}[source]
    fresh = source == "start" and not step
    reason = f"{what}; " + (
        "nothing saved yet, restarting from step 0" if fresh else f"resuming from step {step}{tier}"
    )
    pause = 0.0 if failure.cause == "left" else _pause_s(tries, failure, now)
    reason += f", after {pause:g} s" if pause else ""
    workers = None
    if situation.places is not None:
        before = situation.places.workers
        workers = situation.places.most_workers(without=bad_node)
        reason += f", without node {bad_node}, where {SUSPECT} attempts failed in a row" if bad_node else ""
        if workers is None and situation.places.fewest == 1:
            return Recovery("stop", f"{what}; the remaining nodes have room for no worker")
        if workers is None:
            workers = before
            reason += ", once a replacement node joins"
        if workers != before:
            reason += f", with {'one worker' if workers == 1 else f'{workers} workers'} instead of {before}"
    judge = (failure.step, failure.usual, failure.spread) if failure.cause == "spike" else None
    return Recovery(
        "restart",
        reason,
        source,
        step,
        pause,
        judge=judge,
        doubt=failure.doubt,
        workers=workers,
        avoid=bad_node,
        **more,
    )


def _after_replay(situation: Situation, now: float) -> Recovery:
    """The numbers go wrong at the same step after a replay: it is no transient hardware fault."""
    failure, rules = situation.failure, situation.rules
    action = rules.if_spike if failure.cause == "spike" else rules.if_not_finite
    what = f"{failure.what}, again after a replay"
    more: dict[str, Any]
    if action == "stop":
        key = "health.if_spike" if failure.cause == "spike" else "health.if_not_finite"
        return Recovery("stop", f"{what}; {key} is 'stop'")
    if action == "skip" and failure.window is not None:
        first, end = failure.window
        what, more = f"{what}; skipping samples {first} to {end - 1}", {"skip": failure.window}
    elif action == "lower-rate":
        what, more = (
            f"{what}; learning rate multiplied by {rules.rate_factor:g}",
            {"cut": (failure.step, rules.rate_factor)},
        )
    else:
        what, more = f"{what}; accepted", {"accept": failure.step}
    return _restart(replace(situation, failure=replace(failure, what=what)), now, **more)


def _is_repeated(situation: Situation) -> bool:
    """Whether the previous failure had the same cause, step and place."""
    if not situation.before:
        return False
    now, last = situation.failure, situation.before[-1]
    return (now.cause, now.step, now.place, now.window) == (last.cause, last.step, last.place, last.window)


def _since_progress(situation: Situation) -> list[Failure]:
    """The failures since the run last got further than ever before, the one that did included."""
    furthest, failures = -1, list[Failure]()
    for failure in (*situation.before, situation.failure):
        if failure.reached > furthest:
            furthest, failures = failure.reached, []
        failures.append(failure)
    return failures


def _without_progress(situation: Situation, bad_node: str) -> int:
    """Number of failures since the last progress, without those of a bad node."""
    after = _since_progress(situation)[1:]
    return sum(
        failure.cause not in ("damaged", "room", "left") and not (bad_node and failure.node == bad_node)
        for failure in after
    )


def _bad_node(situation: Situation) -> str:
    """The node where the last SUSPECT attempts failed, if the run can do without it."""
    last = _since_progress(situation)[-SUSPECT:]
    nodes, node, places = {failure.node for failure in last}, situation.failure.node, situation.places
    if places is None or not node or len(last) < SUSPECT or len(nodes) > 1:
        return ""
    return node if node in dict(places.slots) and places.most_workers(node) else ""


def _pause_s(tries: int, failure: Failure, now: float) -> float:
    """Exponential backoff, less the time since the failure."""
    if not tries:
        return 0.0
    return max(0.0, round(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (tries - 1)) - (now - failure.at), 2))
