"""The records of one attempt on its agent's clock, and what each of its devices did."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headway.track.accounts import ACCOUNTS, SPANS, AttemptTime
from headway.track.events import Event, Header, Record, clock_offset
from headway.track.intervals import LONGEST, Interval, flatten, overlay, span_intervals, step_intervals, time_of

_MOST_WORKERS = 1 << 20  # more means a damaged record
_STOPPED_CODE = 75  # a worker that saved and stopped on request


class WorkerEvents(NamedTuple):
    """What one worker recorded: steps on its own clock, everything else on the agent's."""

    steps: list[Event]
    rest: list[Event]
    offset: int
    """Added to a step's time, gives the agent's clock."""


class AttemptRecords:
    """The records of one attempt, on the agent's clock."""

    def __init__(self, number: int, records: Sequence[Record], superseded: bool, kept: int | None) -> None:
        own_records = [record for record in records if record.header.attempt == number]
        agent = next((r for r in own_records if r.header.process == "agent" and r.header.wall), None)
        self.number = number
        self.kept = kept
        self.agent = agent or _stand_in(number, own_records)
        self.ranks: dict[int, WorkerEvents] = {}
        for record in own_records:
            if record.header.rank is not None:
                self.ranks.setdefault(record.header.rank, _worker_events(record, self.agent.header))
        self.start = next((e for e in self.agent.events if e["kind"] == "attempt"), {})
        self.end = next((e for e in self.agent.events if e["kind"] == "end"), {})
        exits = [e for e in self.agent.events if e["kind"] == "exit" and time_of(e) is not None]
        self.exits = {rank: e for e in exits if (rank := time_of(e, "rank")) is not None}
        self.hang = next((e for e in self.agent.events if e["kind"] == "hang" and e.get("ends") is True), None)
        self.begin_t = time_of(self.start) or 0
        self.end_t = max(self._end_time(), self.begin_t)
        outcome = self.end.get("outcome")
        self.outcome = outcome if isinstance(outcome, str) else None
        # An attempt without a recorded end that a later one followed was killed along with its agent.
        self.failed = self.outcome == "failed" or (self.outcome is None and superseded)
        again = {name: "restart" for name, account in SPANS.items() if account == "start-up"}
        self.spans = SPANS | (again if number > 1 else {})

    @property
    def leader(self) -> WorkerEvents:
        """The events of rank 0."""
        return self.ranks.get(0, NO_EVENTS)

    @property
    def workers(self) -> int:
        """How many workers it had: as declared, else those that recorded something."""
        declared = time_of(self.start, "workers")
        return declared if declared is not None and 0 <= declared < _MOST_WORKERS else len(self.ranks)

    def account(self) -> AttemptTime:
        """Sum up every worker's accounts."""
        below = flatten(span_intervals(self.agent.events, self.spans, self.end_t), self.begin_t, self.end_t)
        resumed = [time_of(e, "step") for e in self.leader.rest if e["kind"] == "resumed"]
        outages, storage_ns = self._outages(), 0
        workers = list[dict[str, int]]()
        for rank in range(self.workers):
            pieces = self._worker(rank, below)
            accounts = dict.fromkeys(ACCOUNTS, 0)
            for begin, end, name in pieces:
                accounts[name or "unattributed"] += end - begin
                if name == "checkpoint stall":
                    storage_ns += sum(max(0, min(end, last) - max(begin, first)) for first, last in outages)
            workers.append(accounts)
        return AttemptTime(
            number=self.number,
            wall=self.wall(self.begin_t),
            length_ns=self.end_t - self.begin_t,
            workers=tuple(workers),
            storage_ns=storage_ns,
            ended_in_outage=self.ended_in_outage,
            outcome=self.outcome,
            reason=str(self.end.get("reason", "")),
            device=str(self.start.get("device", "")),
            resumed_from=resumed[-1] if resumed else None,
        )

    def _outages(self) -> list[tuple[int, int]]:
        """Return when the storage had failed, by what the agent recorded; without overlaps."""
        outages, since = list[tuple[int, int]](), None
        for event in self.agent.events:
            t = time_of(event)
            if t is None:
                continue
            kind = event["kind"]
            if kind == "retry" or (kind == "storage" and event.get("works") is False):
                since = t if since is None else since
            elif since is not None and (kind == "checkpoint" or (kind == "storage" and event.get("works"))):
                outages.append((since, t))
                since = None
        return outages if since is None else [*outages, (since, self.end_t)]

    @property
    def ended_in_outage(self) -> bool:
        """Whether its storage had failed and did not work again before its end."""
        outages = self._outages()
        return bool(outages) and outages[-1][1] == self.end_t

    def _worker(self, rank: int, below: list[Interval]) -> Iterable[Interval]:
        """Return what one worker's device did, piece by piece."""
        exit_event = self.exits.get(rank)
        exit_t = self.end_t if exit_event is None else min(max(time_of(exit_event) or 0, self.begin_t), self.end_t)
        worker = self.ranks.get(rank, NO_EVENTS)
        hang_t = self._hang_time()
        open_until = exit_t if hang_t is None else min(exit_t, self._hung_since(hang_t, worker))
        spans = span_intervals(worker.rest, self.spans, open_until)
        steps = step_intervals(worker.steps, worker.offset, self.kept)
        last = max((end for _, end, _ in (*spans, *steps)), default=None)
        spans += _lost_intervals(worker)
        cut_off = self.failed or is_violent(exit_event)
        if hang_t is not None and last is not None:
            # The hang went undetected until the agent reported it; then the worker was killed.
            steps += [(last, hang_t, "detection"), (max(last, hang_t), exit_t, "restart")]
        elif cut_off and steps and last is not None and not any(name == "shut-down" for _, _, name in spans):
            # The unfinished step is lost: from the worker's last interval to its exit.
            steps.append((last, exit_t, "rework"))
        above = flatten([*spans, *steps], self.begin_t, exit_t)
        # After a worker's exit its device waits for the restart or the end; after a failure, possibly for a save.
        for begin, end, name in below:
            if end > exit_t:
                saves = self.failed and name == "checkpoint stall"
                waits = name if saves else "restart" if self.failed else "shut-down"
                above.append((max(begin, exit_t), end, waits))
        return overlay(above, below)

    def _hang_time(self) -> int | None:
        """Return when the agent ended the attempt because of a hang; None if it did not."""
        hang_t = None if self.hang is None else time_of(self.hang)
        return None if hang_t is None else max(hang_t, self.begin_t)

    def _hung_since(self, hang_t: int, worker: WorkerEvents) -> int:
        """Return when progress stopped: the start of the agent's wait, or the worker's last event if that is later.

        A span that was open then counts up to that moment.
        """
        waited_s = plausible_count((self.hang or {}).get("seconds"))
        since = hang_t - round(min(waited_s * 1e9, LONGEST))
        last_events = (_latest(worker.rest), _latest(worker.steps, worker.offset))
        return max(since, *(since if t is None else t for t in last_events))

    def _end_time(self) -> int:
        """Return the end of the allocation: as the agent recorded it, else the latest event of any process."""
        end_t = time_of(self.end)
        if end_t is not None:
            return end_t
        latest = [_latest(self.agent.events)]
        for worker in self.ranks.values():
            latest += [_latest(worker.rest), _latest(worker.steps, worker.offset)]
        return max((t for t in latest if t is not None), default=0)

    def wall(self, t: int) -> float:
        """Return a time on the agent's clock in Unix seconds."""
        return self.agent.header.wall + t / 1e9

    def lost_at(self) -> float | None:
        """Return when its first worker died, in Unix seconds."""
        times = [time_of(event) or 0 for event in self.exits.values() if is_violent(event)]
        return self.wall(min(times)) if times else None

    def errors(self, kind: str) -> dict[int, Event]:
        """Return the errors of a type that workers raised, by rank."""
        return {
            rank: event
            for rank, worker in self.ranks.items()
            for event in worker.rest
            if event["kind"] == "error" and event.get("type") == kind
        }


def _lost_intervals(worker: "WorkerEvents") -> list[Interval]:
    """Return when a worker lost its events: spans that were open then may have ended meanwhile."""
    lost = [(time_of(event, "since"), time_of(event)) for event in worker.rest if event["kind"] == "lost"]
    return [(since + worker.offset, t, "unattributed") for since, t in lost if since is not None and t is not None]


def is_violent(event: Event | None) -> bool:
    """Whether a worker's exit was neither its regular end nor a stop that saved its state."""
    return event is not None and event.get("code") not in (0, _STOPPED_CODE, None)


NO_EVENTS = WorkerEvents([], [], 0)


def _worker_events(record: Record, header: Header) -> WorkerEvents:
    """Split a worker's steps from its other events, and put the latter on the agent's clock."""
    offset = clock_offset(record.header, header)
    steps = [event for event in record.events if event["kind"] == "step"]
    rest = [event for event in record.events if event["kind"] != "step"]
    return WorkerEvents(steps, [e if (t := time_of(e)) is None else e | {"t": t + offset} for e in rest], offset)


def _latest(events: Iterable[Event], offset: int = 0) -> int | None:
    return max((t + offset for event in events if (t := time_of(event)) is not None), default=None)


def _stand_in(number: int, ranks: Sequence[Record]) -> Record:
    """Return a substitute for a missing agent's record: the allocation is then what the workers' records span."""
    headers = [record.header for record in ranks]
    first = min((h for h in headers if h.wall), key=lambda h: h.wall, default=headers[0])
    return Record(Header(number, "agent", first.wall, first.mono, first.boot, first.host), [])


def plausible_count(value: object) -> float:
    """Return a plausible count, else 0."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e30 else 0.0
