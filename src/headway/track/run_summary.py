"""The state of a run in one row, from the ends of its records."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from headway.track.events import Event, Header, Record, clock_offset, read_ends, record_path
from headway.track.run_folder import RunFolder
from headway.track.run_lock import lock_holder

RunState: TypeAlias = Literal["submitted", "running", "finished", "stopped", "failed", "interrupted"]


@dataclass(frozen=True)
class RunSummary:
    """The state of a run, in one row."""

    name: str
    state: RunState
    step: int
    total_steps: int | None
    loss: float | None
    attempts: int
    started: float | None
    """Unix seconds."""
    seconds: float
    """Duration of its attempts, summed."""
    workers: int | None
    device: str
    reason: str
    """Why the last attempt ended, as the agent recorded it."""
    reward: float | None = None
    """Mean reward of the answers that the last step learned from; None but for runs of reinforcement learning."""


def summarize(run: RunFolder, *, locked: bool | None = None) -> RunSummary:
    """Summarize a run from the ends of its records, in constant time for any number of steps.

    `locked` is whether a process holds its lock, where the caller knows.
    """
    attempts = attempt_numbers(run)
    agents = [ends_of(run, number, "agent") for number in attempts]
    leaders = [ends_of(run, number, "rank-0") for number in attempts]
    agent_events = [event for record in agents for event in record.events]
    start = _last(agent_events, "attempt")
    end = _last(agents[-1].events, "end") if agents else {}
    step, loss, reward = _progress(leaders)
    facts = _last([event for record in leaders for event in record.events], "facts")
    return RunSummary(
        name=run.name,
        state=_state(lock_holder(run) is not None if locked is None else locked, end),
        step=step,
        total_steps=_count(facts.get("total_steps")),
        loss=loss,
        attempts=len(attempts),
        started=next((record.header.wall for record in agents if record.header.wall), None),
        seconds=sum(_length_s(*pair) for pair in zip(agents, leaders, strict=True)),
        workers=_count(start.get("workers")),
        device=str(start.get("device", "")),
        reason=str(end.get("reason", "")),
        reward=reward,
    )


def _state(locked: bool, end: Event) -> RunState:
    if locked:
        return "running"
    outcomes: dict[object, RunState] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
    return outcomes.get(end.get("outcome"), "interrupted")


def _progress(leaders: list[Record]) -> tuple[int, float | None, float | None]:
    """Return the last step that counts, the last loss and the last reward, from rank 0 of each attempt."""
    step, loss, reward = 0, None, None
    for record in leaders:
        for event in record.events:
            if event["kind"] in ("resumed", "step"):
                step = _count(event.get("step")) or 0
                loss, reward = event.get("loss", loss), event.get("reward", reward)
    return step, _number(loss), _number(reward)


def _length_s(agent: Record, leader: Record) -> float:
    """Return how long an attempt lasted: until its end, or its last event."""
    last = max((_time(event) for event in agent.events), default=0)
    if not _last(agent.events, "end") and leader.events and agent.header.wall:
        offset = clock_offset(leader.header, agent.header)
        last = max(last, *(_time(event) + offset for event in leader.events))
    return max(last, 0) / 1e9


def ends_of(run: RunFolder, attempt: int, process: str) -> Record:
    """Return the beginning and the end of a process's record of an attempt."""
    try:
        return read_ends(record_path(run.events, attempt, process))
    except FileNotFoundError:
        return Record(Header(attempt, process), [])


def _last(events: list[Event], kind: str) -> Event:
    return next((event for event in reversed(events) if event["kind"] == kind), {})


def _number(value: object) -> float | None:
    return value if isinstance(value, float | int) else None


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def _time(event: Event) -> int:
    return _count(event.get("t")) or 0


def attempt_numbers(run: RunFolder) -> list[int]:
    """Return the numbers of a run's recorded attempts."""
    numbers = {path.name.partition("-")[0] for path in run.events.glob("*-*.jsonl")}
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())
