"""Where every device-second of a run went: `account(records) -> Ledger`.

Each attempt allocates `workers` devices from its start to its end. Each device's recorded intervals are put on the
agent's clock and clipped to the allocation; every nanosecond then belongs to the account of the innermost (latest
begun) interval that covers it, a worker's intervals before its agent's. What no interval covers is unattributed. No
account is computed as a remainder, and they sum to the total exactly.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from headway.track.events import Event, Header, Record, clock_offset, kept_until
from headway.track.replica_vote import blame_replica

ACCOUNTS = (
    "start-up",
    "compile",
    "generation",
    "scoring",
    "weight sync",
    "rollout wait",
    "data stall",
    "compute",
    "checkpoint stall",
    "evaluation",
    "detection",
    "restart",
    "rework",
    "shut-down",
    "unattributed",
)
"""Every account, in display order."""
OF_POLICIES = ("generation", "scoring", "weight sync", "rollout wait")
"""Those that only runs of reinforcement learning have."""

_SPANS = {
    "startup": "start-up",
    "context": "start-up",
    "restore": "start-up",
    "buffers": "start-up",
    "compile": "compile",
    "checkpoint": "checkpoint stall",
    "evaluation": "evaluation",
    "generate": "generation",
    "score": "scoring",
    "sync": "weight sync",
    "idle": "rollout wait",
    "compare": "detection",
    "shutdown": "shut-down",
}

_ADVICE = {
    "start-up": "Its share shrinks as the run gets longer.",
    "compile": "A warm compile cache helps later starts; short runs do better with train.compile = false.",
    "generation": "Shorter answers (rl.max_tokens), or fewer (rl.samples), are sampled sooner.",
    "scoring": "Answers are scored while others are sampled: raise rl.reward_workers, or make the rewards faster.",
    "weight sync": "Workers that hold whole weights share them with the sampler; shards are gathered for every batch.",
    "rollout wait": "Workers wait for the one whose answers are longest.",
    "data stall": "Move the dataset to a faster disk, or leave a core free for the loader.",
    "checkpoint stall": "Save less often: raise checkpoint.every_steps.",
    "evaluation": "Evaluate less often (eval.every_steps, eval.tasks_every_steps) or less of it (eval.windows, "
    "eval.tasks_limit).",
    "detection": "Timeouts follow the run's own step times; the first steps have none yet. Comparing replicas "
    "also counts here (health.compare_every_steps).",
    "restart": "The incidents say why the run restarted.",
    "rework": "Save more often (lower checkpoint.every_steps), so that a failure loses fewer steps.",
    "shut-down": "See the last lines of the workers' logs for what delays their exit.",
    "unattributed": "No recorded interval covers this time; check that the workers' records are complete.",
}


_STORAGE_ADVICE = "Saves waited for storage that had failed (see the incidents): free space, or repair it."
_LONGEST = 1 << 62  # nanoseconds; a larger number means a damaged record
_MOST_WORKERS = 1 << 20  # as above
_STOPPED_CODE = 75  # a worker that saved and stopped on request
_WITH_TEXT = ("adopted", "alone", "corrupted", "hang", "node", "numbers", "storage", "straggler", "tracker", "woken")
"""Kinds of agent events with a `text` that is shown as it is."""
_RAISED_BY_ALL = ("BadNumbers", "Corrupted")
"""Errors that every worker raises at the same time."""


class Incident(NamedTuple):
    """Something that happened to a run, described for people."""

    wall: float
    """Unix seconds."""
    attempt: int
    text: str


class Overhead(NamedTuple):
    """Time spent in an account other than compute, with advice."""

    account: str
    seconds: float
    advice: str


@dataclass(frozen=True)
class AttemptTime:
    """One attempt's part of a ledger."""

    number: int
    wall: float
    """Unix seconds at the start of its allocation."""
    length_ns: int
    """How long the allocation lasted."""
    workers: tuple[Mapping[str, int], ...]
    """The accounts of each worker's device, by rank."""
    outcome: str | None
    """finished, stopped or failed; None while it runs, or when its agent was killed."""
    reason: str
    """Why it ended, as the agent recorded it."""
    device: str
    resumed_from: int | None
    """The step it resumed after; None if it never got that far."""
    storage_ns: int = 0
    """How much of its checkpoint stall was a wait for storage that had failed."""
    ended_in_outage: bool = False
    """Whether its storage had failed and did not work again before its end."""

    @property
    def accounts(self) -> dict[str, int]:
        """Nanoseconds by account, summed over workers."""
        return {name: sum(worker[name] for worker in self.workers) for name in ACCOUNTS}

    @property
    def total_ns(self) -> int:
        """Device-nanoseconds allocated to it."""
        return self.length_ns * len(self.workers)


@dataclass(frozen=True)
class Ledger:
    """Where every device-nanosecond of a run went."""

    accounts: Mapping[str, int]
    """Nanoseconds by account, in the order of ACCOUNTS."""
    total_ns: int
    """Device-nanoseconds allocated: workers x duration, summed over attempts."""
    attempts: tuple[AttemptTime, ...]
    useful_ns: int | None
    """Device time of the kept steps' model FLOPs at the device's peak; None when that is unknown."""
    useful_full_attention_ns: int | None
    """The same, also counting the masked half of attention, as many publications do."""
    steps: int
    """Steps that count."""
    lost_steps: int
    """Steps that a later attempt rolled back."""
    incidents: tuple[Incident, ...]
    storage_ns: int = 0
    """How much of the checkpoint stall was a wait for storage that had failed."""

    def seconds(self, name: str) -> float:
        """Device-seconds in an account."""
        return self.accounts[name] / 1e9

    def share(self, name: str) -> float:
        """An account's share of the allocation, 0 to 1."""
        return self.accounts[name] / self.total_ns if self.total_ns else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization during the kept steps (compute and data stall); None if the peak is unknown or too
        low."""
        return None if self.peak_too_low else self._over_steps(self.useful_ns)

    @property
    def mfu_full_attention(self) -> float | None:
        """The same, also counting the masked half of attention."""
        return None if self.peak_too_low else self._over_steps(self.useful_full_attention_ns)

    @property
    def peak_too_low(self) -> bool:
        """Whether steps were faster than the peak allows: that of a CPU is measured at the start, when other work may
        have slowed it down."""
        return (self._over_steps(self.useful_ns) or 0.0) > 1.0

    def _over_steps(self, useful_ns: int | None) -> float | None:
        time_ns = self.accounts["compute"] + self.accounts["data stall"]
        return useful_ns / time_ns if useful_ns is not None and time_ns else None


def account(records: Iterable[Record]) -> Ledger:
    """Attribute every device-nanosecond of a run to an account."""
    records = list(records)
    kept = kept_until(records)
    numbers = sorted({record.header.attempt for record in records})
    attempts = [_AttemptRecords(number, records, number != numbers[-1], kept.get(number)) for number in numbers]
    times = tuple(attempt.account() for attempt in attempts)
    steps, lost = _count_steps(attempts)
    pairs = zip(attempts, (None, *attempts), strict=False)
    incidents = sorted(
        incident for attempt, before in pairs for incident in attempt.incidents(lost.get(attempt.number, 0), before)
    )
    return Ledger(
        accounts={name: sum(attempt.accounts[name] for attempt in times) for name in ACCOUNTS},
        total_ns=sum(attempt.total_ns for attempt in times),
        attempts=times,
        useful_ns=_useful_ns(attempts, "flops_per_token"),
        useful_full_attention_ns=_useful_ns(attempts, "flops_per_token_full_attention"),
        steps=steps,
        lost_steps=sum(lost.values()),
        incidents=tuple(incidents),
        storage_ns=sum(attempt.storage_ns for attempt in times),
    )


def largest_overhead(ledger: Ledger) -> Overhead | None:
    """Return the account other than compute that took the most time, with advice; None if there is no overhead."""
    name = max((name for name in ACCOUNTS if name != "compute"), key=lambda name: ledger.accounts[name])
    outage = any(attempt.ended_in_outage for attempt in ledger.attempts)
    waited = outage or 2 * ledger.storage_ns > ledger.accounts["checkpoint stall"]
    advice = _STORAGE_ADVICE if name == "checkpoint stall" and waited else _ADVICE[name]
    return Overhead(name, ledger.seconds(name), advice) if ledger.accounts[name] else None


# -- intervals


_Interval: TypeAlias = tuple[int, int, str]
"""Begin, end, account. A plain tuple: named tuples were the largest single cost of a long run's ledger."""


def _flatten(intervals: Iterable[_Interval], begin: int, end: int) -> list[_Interval]:
    """Cut [begin, end] into pieces, each with the account of its innermost interval, "" for none.

    Innermost is the latest begun; of two begun together, the shorter, then the later recorded. Intervals may cross.
    """
    pieces: list[_Interval] = []
    open_: list[tuple[int, str]] = []  # ends and accounts, by start time: the last still open is innermost
    now = begin

    def advance(until: int) -> None:
        nonlocal now
        while now < until:
            while open_ and open_[-1][0] <= now:
                open_.pop()
            upto, name = open_[-1] if open_ else (until, "")
            pieces.append((now, min(upto, until), name))
            now = min(upto, until)

    # Sorted before they are clipped: of two that began before the allocation, the later is still the inner one.
    for first, last, name in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
        if max(first, begin) < min(last, end):
            if first > now:
                advance(first)
            open_.append((last, name))
    advance(end)
    return pieces


def _overlay(upper: list[_Interval], lower: list[_Interval]) -> Iterable[_Interval]:
    """Fill the gaps of a flat list from another that covers the same time."""
    begins = [begin for begin, _, _ in lower]
    for piece in upper:
        begin, end, name = piece
        if name:
            yield piece
            continue
        index = max(bisect_right(begins, begin) - 1, 0)
        while index < len(lower) and lower[index][0] < end:
            first, last, name = lower[index]
            yield max(first, begin), min(last, end), name
            index += 1


def _time(event: Event, name: str = "t") -> int | None:
    """Return an integer field of an event; None if it is missing or out of range."""
    value = event.get(name)
    return value if type(value) is int and -_LONGEST < value < _LONGEST else None


def _span_intervals(events: Sequence[Event], accounts: Mapping[str, str], open_until: int) -> list[_Interval]:
    """Return the spans of a process; an end closes all spans begun inside, unclosed ones end at `open_until`."""
    spans: list[_Interval] = []  # by start, with names for accounts
    open_: list[int] = []
    for event in events:
        t, name = _time(event), str(event.get("name"))
        if t is None or name not in accounts:
            continue
        if event["kind"] == "begin":
            open_.append(len(spans))
            spans.append((t, open_until, name))
        elif event["kind"] == "end-span" and any(spans[index][2] == name for index in open_):
            closed = ""
            while closed != name:
                index = open_.pop()
                begin, _, closed = spans[index]
                spans[index] = (begin, t, closed)
    return [(begin, end, accounts[name]) for begin, end, name in spans]


def _lost_intervals(worker: "_WorkerEvents") -> list[_Interval]:
    """Return when a worker lost its events: spans that were open then may have ended meanwhile."""
    lost = [(_time(event, "since"), _time(event)) for event in worker.rest if event["kind"] == "lost"]
    return [(since + worker.offset, t, "unattributed") for since, t in lost if since is not None and t is not None]


def _step_intervals(steps: Iterable[Event], offset: int, kept: int | None) -> list[_Interval]:
    """Return the data stall and compute of each step; those of rolled-back steps are rework.

    The wait for a save's copy is a separate interval at the end of the step, where the device waits.
    """
    intervals: list[_Interval] = []
    for event in steps:
        t, step = _time(event), _time(event, "step")
        if t is None or step is None:
            continue
        end = t + offset
        computed = end - (_time(event, "compute") or 0)
        waited = computed - (_time(event, "data") or 0)
        lost = kept is not None and step > kept
        intervals.append((waited, computed, "rework" if lost else "data stall"))
        intervals.append((computed, end, "rework" if lost else "compute"))
        stalled = min(_time(event, "checkpoint") or 0, end - computed)
        if stalled > 0 and not lost:
            intervals.append((end - stalled, end, "checkpoint stall"))
    return intervals


# -- attempts


class _WorkerEvents(NamedTuple):
    """What one worker recorded: steps on its own clock, everything else on the agent's."""

    steps: list[Event]
    rest: list[Event]
    offset: int
    """Added to a step's time, gives the agent's clock."""


class _AttemptRecords:
    """The records of one attempt, on the agent's clock."""

    def __init__(self, number: int, records: Sequence[Record], superseded: bool, kept: int | None) -> None:
        own_records = [record for record in records if record.header.attempt == number]
        agent = next((r for r in own_records if r.header.process == "agent" and r.header.wall), None)
        self.number = number
        self.kept = kept
        self.agent = agent or _stand_in(number, own_records)
        self.ranks: dict[int, _WorkerEvents] = {}
        for record in own_records:
            if record.header.rank is not None:
                self.ranks.setdefault(record.header.rank, _worker_events(record, self.agent.header))
        self.start = next((e for e in self.agent.events if e["kind"] == "attempt"), {})
        self.end = next((e for e in self.agent.events if e["kind"] == "end"), {})
        exits = [e for e in self.agent.events if e["kind"] == "exit" and _time(e) is not None]
        self.exits = {rank: e for e in exits if (rank := _time(e, "rank")) is not None}
        self.hang = next((e for e in self.agent.events if e["kind"] == "hang" and e.get("ends") is True), None)
        self.begin_t = _time(self.start) or 0
        self.end_t = max(self._end_time(), self.begin_t)
        outcome = self.end.get("outcome")
        self.outcome = outcome if isinstance(outcome, str) else None
        # An attempt without a recorded end that a later one followed was killed along with its agent.
        self.failed = self.outcome == "failed" or (self.outcome is None and superseded)
        again = {name: "restart" for name, account in _SPANS.items() if account == "start-up"}
        self.spans = _SPANS | (again if number > 1 else {})

    @property
    def leader(self) -> _WorkerEvents:
        """The events of rank 0."""
        return self.ranks.get(0, _NO_EVENTS)

    @property
    def workers(self) -> int:
        declared = _time(self.start, "workers")
        return declared if declared is not None and 0 <= declared < _MOST_WORKERS else len(self.ranks)

    def account(self) -> AttemptTime:
        """Sum up every worker's accounts."""
        below = _flatten(_span_intervals(self.agent.events, self.spans, self.end_t), self.begin_t, self.end_t)
        resumed = [_time(e, "step") for e in self.leader.rest if e["kind"] == "resumed"]
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
            wall=self._wall(self.begin_t),
            length_ns=self.end_t - self.begin_t,
            workers=tuple(workers),
            storage_ns=storage_ns,
            ended_in_outage=self._ended_in_outage,
            outcome=self.outcome,
            reason=str(self.end.get("reason", "")),
            device=str(self.start.get("device", "")),
            resumed_from=resumed[-1] if resumed else None,
        )

    def _outages(self) -> list[tuple[int, int]]:
        """Return when the storage had failed, by what the agent recorded; without overlaps."""
        outages, since = list[tuple[int, int]](), None
        for event in self.agent.events:
            t = _time(event)
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
    def _ended_in_outage(self) -> bool:
        outages = self._outages()
        return bool(outages) and outages[-1][1] == self.end_t

    def _worker(self, rank: int, below: list[_Interval]) -> Iterable[_Interval]:
        """Return what one worker's device did, piece by piece."""
        exit_event = self.exits.get(rank)
        exit_t = self.end_t if exit_event is None else min(max(_time(exit_event) or 0, self.begin_t), self.end_t)
        worker = self.ranks.get(rank, _NO_EVENTS)
        hang_t = self._hang_time()
        open_until = exit_t if hang_t is None else min(exit_t, self._hung_since(hang_t, worker))
        spans = _span_intervals(worker.rest, self.spans, open_until)
        steps = _step_intervals(worker.steps, worker.offset, self.kept)
        last = max((end for _, end, _ in (*spans, *steps)), default=None)
        spans += _lost_intervals(worker)
        cut_off = self.failed or _is_violent(exit_event)
        if hang_t is not None and last is not None:
            # The hang went undetected until the agent reported it; then the worker was killed.
            steps += [(last, hang_t, "detection"), (max(last, hang_t), exit_t, "restart")]
        elif cut_off and steps and last is not None and not any(name == "shut-down" for _, _, name in spans):
            # The unfinished step is lost: from the worker's last interval to its exit.
            steps.append((last, exit_t, "rework"))
        above = _flatten([*spans, *steps], self.begin_t, exit_t)
        # After a worker's exit its device waits for the restart or the end; after a failure, possibly for a save.
        for begin, end, name in below:
            if end > exit_t:
                saves = self.failed and name == "checkpoint stall"
                waits = name if saves else "restart" if self.failed else "shut-down"
                above.append((max(begin, exit_t), end, waits))
        return _overlay(above, below)

    def _hang_time(self) -> int | None:
        """Return when the agent ended the attempt because of a hang; None if it did not."""
        hang_t = None if self.hang is None else _time(self.hang)
        return None if hang_t is None else max(hang_t, self.begin_t)

    def _hung_since(self, hang_t: int, worker: _WorkerEvents) -> int:
        """Return when progress stopped: the start of the agent's wait, or the worker's last event if that is later.

        A span that was open then counts up to that moment.
        """
        waited_s = _number((self.hang or {}).get("seconds"))
        since = hang_t - round(min(waited_s * 1e9, _LONGEST))
        last_events = (_latest(worker.rest), _latest(worker.steps, worker.offset))
        return max(since, *(since if t is None else t for t in last_events))

    def _end_time(self) -> int:
        """Return the end of the allocation: as the agent recorded it, else the latest event of any process."""
        end_t = _time(self.end)
        if end_t is not None:
            return end_t
        latest = [_latest(self.agent.events)]
        for worker in self.ranks.values():
            latest += [_latest(worker.rest), _latest(worker.steps, worker.offset)]
        return max((t for t in latest if t is not None), default=0)

    def _wall(self, t: int) -> float:
        return self.agent.header.wall + t / 1e9

    def lost_at(self) -> float | None:
        """Return when its first worker died, in Unix seconds."""
        times = [_time(event) or 0 for event in self.exits.values() if _is_violent(event)]
        return self._wall(min(times)) if times else None

    def incidents(self, lost: int, before: "_AttemptRecords | None" = None) -> Iterable[Incident]:
        """Yield what went wrong, and where the attempt resumed from the previous one."""
        failure = self.end.get("failure") or {}
        nodes_lost = failure.get("cause") in ("lost", "room")
        if nodes_lost:
            yield Incident(self.lost_at() or self._wall(self.end_t), self.number, str(failure.get("what", "")))
        for rank, event in {}.items() if nodes_lost else self.exits.items():
            code, t = _time(event, "code") or 0, _time(event) or 0
            if _is_violent(event) and not self._is_collateral(rank, t):
                how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
                yield Incident(self._wall(t), self.number, f"worker {rank} {how} {self._last_step(rank)}")
        if self.outcome == "failed" and not any(_is_violent(event) for event in self.exits.values()):
            yield Incident(self._wall(self.end_t), self.number, f"failed: {self.end.get('reason', '')}")
        skipped = [event for event in self.agent.events if event["kind"] == "skipped"]
        if skipped:
            first, many = skipped[0], f"{len(skipped)} saves" if len(skipped) > 1 else "one save"
            skips = f"{many} skipped, first at step {first.get('step')}: the previous save was still being written"
            yield Incident(self._wall(_time(first) or 0), self.number, skips)
        if self.outcome is None and self.failed:
            why = "the agent vanished without recording an end"
            why = "no end was recorded: the storage had failed" if self._ended_in_outage else why
            yield Incident(self._wall(self.end_t), self.number, why)
        events_by_process = {"agent": self.agent.events} | {
            f"worker {rank}": worker.rest for rank, worker in self.ranks.items()
        }
        for process, events in events_by_process.items():
            for event in events:
                text = _incident_text(event, process)
                if event["kind"] == "resumed" and self.number > 1 and process == "worker 0":
                    text = self._resumed(event, lost, before)
                if text is not None:
                    yield Incident(self._wall(_time(event) or 0), self.number, text)
        yield from self._common_errors()
        yield from self._replica_at_fault(before)

    def _is_collateral(self, rank: int, t: int) -> bool:
        """Whether a worker died only because of another: it lost the connection, or was killed because of a hang."""
        raised = [event for event in self.ranks.get(rank, _NO_EVENTS).rest if event["kind"] == "error"]
        if raised and raised[-1].get("type") == "PeerFailed":
            return True
        hangs = [event for event in self.agent.events if event["kind"] == "hang" and event.get("ends")]
        return any((_time(event) or 0) <= t for event in hangs)

    def _replica_at_fault(self, before: "_AttemptRecords | None") -> Iterable[Incident]:
        """Yield which replica was corrupted, once this attempt has replayed the suspect step."""
        doubts = [event for worker in self.ranks.values() for event in worker.rest if event["kind"] == "doubt"]
        errors = {} if before is None else before.errors("Corrupted")
        text = blame_replica(errors, doubts) if errors else None
        if text is not None:
            t = _time(doubts[0]) if doubts else self.begin_t
            yield Incident(self._wall(t or 0), self.number, text)

    def errors(self, kind: str) -> dict[int, Event]:
        """Return the errors of a type that workers raised, by rank."""
        return {
            rank: event
            for rank, worker in self.ranks.items()
            for event in worker.rest
            if event["kind"] == "error" and event.get("type") == kind
        }

    def _common_errors(self) -> Iterable[Incident]:
        """Yield once what every worker raised, unless the agent reported it; prefer an error that names tensors."""
        rest = (event for worker in self.ranks.values() for event in worker.rest)
        raised = [event for event in rest if event["kind"] == "error" and event.get("type") in _RAISED_BY_ALL]
        if raised and not any(event["kind"] in ("corrupted", "numbers") for event in self.agent.events):
            event = max(raised, key=lambda event: bool(event.get("tensors")))
            yield Incident(self._wall(_time(event) or 0), self.number, str(event.get("message", "")))

    def _resumed(self, event: Event, lost: int, before: "_AttemptRecords | None") -> str:
        text = f"resumed after step {event.get('step')}, {lost} step{'s' * (lost != 1)} to redo"
        text += "".join(f"; {key} {_change(pair)}" for key, pair in self._changes().items())
        return text + self._restart_time(self._wall(_time(event) or 0), before)

    def _restart_time(self, wall: float, before: "_AttemptRecords | None") -> str:
        """Return where an automatic restart got its state from, and how long after the failure."""
        source, lost_at = self.start.get("source"), before.lost_at() if before else None
        if not isinstance(source, str):
            return ""
        origin = "" if source == "start" else f"; from {'the object store' if source == 'store' else source}"
        return origin + (f", {wall - lost_at:.1f} s after the failure" if lost_at is not None else "")

    def _changes(self) -> Mapping[str, object]:
        changed = self.start.get("recipe_changes")
        return changed if isinstance(changed, dict) else {}

    def _last_step(self, rank: int) -> str:
        steps = self.ranks.get(rank, _NO_EVENTS).steps
        return f"after step {steps[-1].get('step')}" if steps else "before its first step"


def _incident_text(event: Event, process: str) -> str | None:
    """Return the text of an event that is an incident by itself, else None."""
    match event["kind"]:
        case "error" if event.get("type") not in ("PeerFailed", *_RAISED_BY_ALL):
            return f"{process}: {event.get('message', '')}"
        case kind if kind in _WITH_TEXT and process == "agent" and event.get("text"):
            return str(event["text"])
        case "waiting":
            return str(event.get("text", "")).partition(": headway agent")[0]  # how to start it is in the log
        case "rhythm":
            every, cost = _number(event.get("seconds")), _number(event.get("cost"))
            return f"saving every {every:,.0f} s from now on; each save stalls for {cost:.3f} s"
        case "lost":
            return f"{process}: {event.get('text', '')}"
        case "unsaved":
            what = "uploaded" if event.get("tier") == "store" else "saved"
            return f"step {event.get('step')} was not {what}: {event.get('message')}"
        case "log" if isinstance(event.get("changed"), dict):
            return f"{event.get('message')}: {', '.join(map(str, event['changed']))} changed"
    return None


def _change(pair: object) -> str:
    return f"{pair[0]} -> {pair[1]}" if isinstance(pair, list) and len(pair) == 2 else str(pair)


def _is_violent(event: Event | None) -> bool:
    """Whether a worker's exit was neither its regular end nor a stop that saved its state."""
    return event is not None and event.get("code") not in (0, _STOPPED_CODE, None)


_NO_EVENTS = _WorkerEvents([], [], 0)


def _worker_events(record: Record, header: Header) -> _WorkerEvents:
    """Split a worker's steps from its other events, and put the latter on the agent's clock."""
    offset = clock_offset(record.header, header)
    steps = [event for event in record.events if event["kind"] == "step"]
    rest = [event for event in record.events if event["kind"] != "step"]
    return _WorkerEvents(steps, [e if (t := _time(e)) is None else e | {"t": t + offset} for e in rest], offset)


def _latest(events: Iterable[Event], offset: int = 0) -> int | None:
    return max((t + offset for event in events if (t := _time(event)) is not None), default=None)


def _stand_in(number: int, ranks: Sequence[Record]) -> Record:
    """Return a substitute for a missing agent's record: the allocation is then what the workers' records span."""
    headers = [record.header for record in ranks]
    first = min((h for h in headers if h.wall), key=lambda h: h.wall, default=headers[0])
    return Record(Header(number, "agent", first.wall, first.mono, first.boot, first.host), [])


# -- steps


def _count_steps(attempts: Sequence[_AttemptRecords]) -> tuple[int, dict[int, int]]:
    """Return how many steps count, and how many earlier ones each attempt rolled back."""
    counted: set[int] = set()
    lost: dict[int, int] = {}
    for attempt in attempts:
        resumed = [s for e in attempt.leader.rest if e["kind"] == "resumed" and (s := _time(e, "step")) is not None]
        if resumed:
            back = {step for step in counted if step > resumed[-1]}
            lost[attempt.number] = len(back)
            counted -= back
        counted |= {step for e in attempt.leader.steps if (step := _time(e, "step")) is not None}
    return len(counted), lost


def _useful_ns(attempts: Sequence[_AttemptRecords], flops_key: str) -> int | None:
    """Return the device time of the kept steps' model FLOPs at peak; None if no attempt recorded its peak."""
    useful: float | None = None
    for attempt in attempts:
        facts = [event for event in attempt.leader.rest if event["kind"] == "facts"]
        flops, peak = (_number(facts[-1].get(key)) if facts else 0.0 for key in (flops_key, "peak_flops"))
        if not flops or peak < 1:
            continue
        tokens = sum(_number(event.get("tokens")) for event in attempt.leader.steps if _is_kept(event, attempt.kept))
        useful = (useful or 0.0) + tokens * flops / peak * 1e9
    return None if useful is None else round(useful)


def _number(value: object) -> float:
    """Return a plausible count, else 0."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e30 else 0.0


def _is_kept(event: Event, kept: int | None) -> bool:
    step = _time(event, "step")
    return step is not None and (kept is None or step <= kept)
