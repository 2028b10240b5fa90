"""Where every device-second of a run went: `account(records) -> Ledger`.

Each attempt allocates `workers` devices from its first moment to its end. For each device the recorded
intervals are laid on the agent's clock and clipped to the allocation; every nanosecond then belongs to one
account, that of the innermost (latest begun) interval that covers it, a worker's own before its agent's.
What no interval covers is unattributed. Nothing is computed as a rest; the accounts sum to the total exactly.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from headway.track.events import Event, Header, Record, clock_offset, kept_until
from headway.track.replica_vote import blame_replica

__all__ = ["ACCOUNTS", "AttemptTime", "Incident", "Ledger", "Overhead", "account", "largest_overhead"]

ACCOUNTS = (
    "start-up",
    "compile",
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
"""Every account, in the order in which they are shown."""

_SPANS = {
    "startup": "start-up",
    "context": "start-up",
    "restore": "start-up",
    "buffers": "start-up",
    "compile": "compile",
    "checkpoint": "checkpoint stall",
    "evaluation": "evaluation",
    "compare": "detection",
    "shutdown": "shut-down",
}

_ADVICE = {
    "start-up": "Longer runs make it vanish.",
    "compile": "A warm compile cache helps later starts; short runs do better with train.compile = false.",
    "data stall": "Put the data folder on a faster disk, or leave the loader a free core.",
    "checkpoint stall": "Save less often: raise checkpoint.every_steps.",
    "evaluation": "Evaluate less often (eval.every_steps) or on fewer windows (eval.windows).",
    "detection": "Timeouts follow the run's own step times; the first steps of a run have none yet. Comparing replicas "
    "counts here too (health.compare_every_steps).",
    "restart": "The incidents say why it was started again; longer attempts make it vanish.",
    "rework": "Save more often: lower checkpoint.every_steps, so that a failure throws fewer steps away.",
    "shut-down": "Look at the last lines of the workers' logs: something holds them up at the end.",
    "unattributed": "No recorded interval covers this time; check that the workers' records are complete.",
}


_LONGEST = 1 << 62  # nanoseconds; a larger number in a record is damage
_MOST_WORKERS = 1 << 20  # as above
_STOPPED_CODE = 75  # a worker that saved and stopped as asked: worth resuming
_TOLD = ("adopted", "alone", "corrupted", "hang", "numbers", "straggler", "woken")
"""What an agent records for people, in its own words."""
_ALIKE = ("BadNumbers", "Corrupted")
"""Errors that all workers raise together."""


class Incident(NamedTuple):
    """Something that happened to a run, for people."""

    wall: float
    """Unix seconds."""
    attempt: int
    text: str


class Overhead(NamedTuple):
    """An account that is no training, how much went there, and what to try."""

    account: str
    seconds: float
    advice: str


@dataclass(frozen=True)
class AttemptTime:
    """One attempt's share of a ledger."""

    number: int
    wall: float
    """Unix seconds when its allocation began."""
    length_ns: int
    """How long the allocation lasted."""
    workers: tuple[Mapping[str, int], ...]
    """The accounts of each worker's device, by rank."""
    outcome: str | None
    """finished, stopped or failed; None while it runs, or when its agent was killed."""
    reason: str
    """Why it ended, in the agent's words."""
    device: str
    resumed_from: int | None
    """The step after which it trained; None when it never got that far."""

    @property
    def accounts(self) -> dict[str, int]:
        """The accounts of all its workers together, in nanoseconds."""
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
    """What was allocated: over all attempts, workers x duration."""
    attempts: tuple[AttemptTime, ...]
    useful_ns: int | None
    """Device time of the kept steps' model FLOPs at the device's peak; None when that is unknown."""
    useful_full_attention_ns: int | None
    """The same, counting the masked half of attention too, as others publish it."""
    steps: int
    """Steps that count."""
    lost_steps: int
    """Steps that a later attempt threw away."""
    incidents: tuple[Incident, ...]

    def seconds(self, name: str) -> float:
        """Device-seconds in an account."""
        return self.accounts[name] / 1e9

    def share(self, name: str) -> float:
        """An account's share of the allocation, 0 to 1."""
        return self.accounts[name] / self.total_ns if self.total_ns else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the peak's during the kept steps (compute and data stall)."""
        return self._over_steps(self.useful_ns)

    @property
    def mfu_full_attention(self) -> float | None:
        """The same, counting the masked half of attention too."""
        return self._over_steps(self.useful_full_attention_ns)

    def _over_steps(self, useful_ns: int | None) -> float | None:
        time_ns = self.accounts["compute"] + self.accounts["data stall"]
        return useful_ns / time_ns if useful_ns is not None and time_ns else None


def account(records: Iterable[Record]) -> Ledger:
    """Say where every device-nanosecond of a run went."""
    records = list(records)
    kept = kept_until(records)
    numbers = sorted({record.header.attempt for record in records})
    lives = [_Life(number, records, number != numbers[-1], kept.get(number)) for number in numbers]
    attempts = tuple(life.account() for life in lives)
    steps, lost = _count_steps(lives)
    pairs = zip(lives, (None, *lives), strict=False)
    incidents = sorted(
        incident for life, before in pairs for incident in life.incidents(lost.get(life.number, 0), before)
    )
    return Ledger(
        accounts={name: sum(attempt.accounts[name] for attempt in attempts) for name in ACCOUNTS},
        total_ns=sum(attempt.total_ns for attempt in attempts),
        attempts=attempts,
        useful_ns=_useful_ns(lives, "flops_per_token"),
        useful_full_attention_ns=_useful_ns(lives, "flops_per_token_full_attention"),
        steps=steps,
        lost_steps=sum(lost.values()),
        incidents=tuple(incidents),
    )


def largest_overhead(ledger: Ledger) -> Overhead | None:
    """Return the account other than compute that took most, and what to try; None when nothing was lost."""
    name = max((name for name in ACCOUNTS if name != "compute"), key=lambda name: ledger.accounts[name])
    return Overhead(name, ledger.seconds(name), _ADVICE[name]) if ledger.accounts[name] else None


# -- intervals


_Interval: TypeAlias = tuple[int, int, str]
"""Begin, end, account. A plain tuple: making named ones was the largest single cost of a long run's ledger."""


def _flatten(intervals: Iterable[_Interval], begin: int, end: int) -> list[_Interval]:
    """Cut [begin, end] into pieces, each with the account of its innermost interval, "" where there is none.

    Innermost is the latest begun; of two begun together the shorter, then the later recorded. They may cross.
    """
    pieces: list[_Interval] = []
    open_: list[tuple[int, str]] = []  # ends and accounts, by time of beginning: the last still going is innermost
    now = begin

    def advance(until: int) -> None:
        nonlocal now
        while now < until:
            while open_ and open_[-1][0] <= now:
                open_.pop()
            upto, name = open_[-1] if open_ else (until, "")
            pieces.append((now, min(upto, until), name))
            now = min(upto, until)

    # Sorted before they are clipped: of two that began before the allocation, the later is still the inner.
    for first, last, name in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
        if max(first, begin) < min(last, end):
            if first > now:
                advance(first)
            open_.append((last, name))
    advance(end)
    return pieces


def _overlay(upper: list[_Interval], lower: list[_Interval]) -> Iterable[_Interval]:
    """Fill the gaps of one flat list with another that covers the same time."""
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
    """Return one of an event's times, or None where it is missing or no integer."""
    value = event.get(name)
    return value if type(value) is int and -_LONGEST < value < _LONGEST else None


def _span_intervals(events: Sequence[Event], accounts: Mapping[str, str], open_until: int) -> list[_Interval]:
    """Return the spans of one process; an end closes what was begun inside, the rest ends at `open_until`."""
    spans: list[_Interval] = []  # in the order of their beginnings, by name
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


def _step_intervals(steps: Iterable[Event], offset: int, kept: int | None) -> list[_Interval]:
    """Return the data wait and the compute of each step; those of steps thrown away since are rework.

    What a step waited for a save's copy is counted apart, before its end: that is where the device waits.
    """
    found: list[_Interval] = []
    for event in steps:
        t, step = _time(event), _time(event, "step")
        if t is None or step is None:
            continue
        end = t + offset
        computed = end - (_time(event, "compute") or 0)
        waited = computed - (_time(event, "data") or 0)
        lost = kept is not None and step > kept
        found.append((waited, computed, "rework" if lost else "data stall"))
        found.append((computed, end, "rework" if lost else "compute"))
        stalled = min(_time(event, "checkpoint") or 0, end - computed)
        if stalled > 0 and not lost:
            found.append((end - stalled, end, "checkpoint stall"))
    return found


# -- attempts


class _Story(NamedTuple):
    """What one worker recorded: its many steps on its own clock, the rest on the agent's."""

    steps: list[Event]
    rest: list[Event]
    offset: int
    """What brings a step's time to the agent's clock."""


class _Life:
    """One attempt as its records tell it, everything on the agent's clock."""

    def __init__(self, number: int, records: Sequence[Record], superseded: bool, kept: int | None) -> None:
        mine = [record for record in records if record.header.attempt == number]
        agent = next((r for r in mine if r.header.process == "agent" and r.header.wall), None)
        self.number = number
        self.kept = kept
        self.agent = agent or _stand_in(number, mine)
        self.ranks: dict[int, _Story] = {}
        for record in mine:
            if record.header.rank is not None:
                self.ranks.setdefault(record.header.rank, _story(record, self.agent.header))
        self.start = next((e for e in self.agent.events if e["kind"] == "attempt"), {})
        self.end = next((e for e in self.agent.events if e["kind"] == "end"), {})
        exits = [e for e in self.agent.events if e["kind"] == "exit" and _time(e) is not None]
        self.exits = {rank: e for e in exits if (rank := _time(e, "rank")) is not None}
        self.hang = next((e for e in self.agent.events if e["kind"] == "hang" and e.get("ends") is True), None)
        self.begin_t = _time(self.start) or 0
        self.end_t = max(self._end_time(), self.begin_t)
        outcome = self.end.get("outcome")
        self.outcome = outcome if isinstance(outcome, str) else None
        # An attempt that another one followed without a word of its end was cut off with its agent.
        self.failed = self.outcome == "failed" or (self.outcome is None and superseded)
        again = {name: "restart" for name, account in _SPANS.items() if account == "start-up"}
        self.spans = _SPANS | (again if number > 1 else {})

    @property
    def leader(self) -> _Story:
        """What rank 0 recorded."""
        return self.ranks.get(0, _NO_STORY)

    @property
    def workers(self) -> int:
        declared = _time(self.start, "workers")
        return declared if declared is not None and 0 <= declared < _MOST_WORKERS else len(self.ranks)

    def account(self) -> AttemptTime:
        """Lay out every worker's time and add it up."""
        below = _flatten(_span_intervals(self.agent.events, self.spans, self.end_t), self.begin_t, self.end_t)
        resumed = [_time(e, "step") for e in self.leader.rest if e["kind"] == "resumed"]
        return AttemptTime(
            number=self.number,
            wall=self._wall(self.begin_t),
            length_ns=self.end_t - self.begin_t,
            workers=tuple(self._worker(rank, below) for rank in range(self.workers)),
            outcome=self.outcome,
            reason=str(self.end.get("reason", "")),
            device=str(self.start.get("device", "")),
            resumed_from=resumed[-1] if resumed else None,
        )

    def _worker(self, rank: int, below: list[_Interval]) -> dict[str, int]:
        """Return one worker's accounts."""
        gone = self.exits.get(rank)
        exit_t = self.end_t if gone is None else min(max(_time(gone) or 0, self.begin_t), self.end_t)
        story = self.ranks.get(rank, _NO_STORY)
        hang_t = self._hang_time()
        open_until = exit_t if hang_t is None else min(exit_t, self._hung_since(hang_t, story))
        spans = _span_intervals(story.rest, self.spans, open_until)
        steps = _step_intervals(story.steps, story.offset, self.kept)
        last = max((end for _, end, _ in (*spans, *steps)), default=None)
        cut_off = self.failed or _is_violent(gone)
        if hang_t is not None and last is not None:
            # Nobody knew that it hung until the agent said so; then it was ended.
            steps += [(last, hang_t, "detection"), (max(last, hang_t), exit_t, "restart")]
        elif cut_off and steps and last is not None and not any(name == "shut-down" for _, _, name in spans):
            # The step under way when it went down is lost: from its last interval to its exit.
            steps.append((last, exit_t, "rework"))
        above = _flatten([*spans, *steps], self.begin_t, exit_t)
        # When a worker is gone its device waits: for the next start or the end; where that failed, perhaps for a save.
        for begin, end, name in below:
            if end > exit_t:
                saves = self.failed and name == "checkpoint stall"
                waits = name if saves else "restart" if self.failed else "shut-down"
                above.append((max(begin, exit_t), end, waits))
        accounts = dict.fromkeys(ACCOUNTS, 0)
        for begin, end, name in _overlay(above, below):
            accounts[name or "unattributed"] += end - begin
        return accounts

    def _hang_time(self) -> int | None:
        """Return when the agent ended the attempt for a hang; None if it did not."""
        told = None if self.hang is None else _time(self.hang)
        return None if told is None else max(told, self.begin_t)

    def _hung_since(self, hang_t: int, story: _Story) -> int:
        """Return when the marks stopped that the agent waited for, or a worker's last event came, if that was later.

        What was under way then is taken to have lasted until then.
        """
        waited_s = _number((self.hang or {}).get("seconds"))
        since = hang_t - round(min(waited_s * 1e9, _LONGEST))
        heard = (_latest(story.rest), _latest(story.steps, story.offset))
        return max(since, *(since if t is None else t for t in heard))

    def _end_time(self) -> int:
        """Return when the allocation ended: as the agent says, else at the latest event of any process."""
        told = _time(self.end)
        if told is not None:
            return told
        latest = [_latest(self.agent.events)]
        for story in self.ranks.values():
            latest += [_latest(story.rest), _latest(story.steps, story.offset)]
        return max((t for t in latest if t is not None), default=0)

    def _wall(self, t: int) -> float:
        return self.agent.header.wall + t / 1e9

    def lost_at(self) -> float | None:
        """When its first worker went down, in Unix seconds."""
        times = [_time(event) or 0 for event in self.exits.values() if _is_violent(event)]
        return self._wall(min(times)) if times else None

    def incidents(self, lost: int, before: "_Life | None" = None) -> Iterable[Incident]:
        """Tell what went wrong, and where the attempt took over from the one before."""
        failure = self.end.get("failure") or {}
        of_nodes = failure.get("cause") in ("lost", "room")
        if of_nodes:
            yield Incident(self.lost_at() or self._wall(self.end_t), self.number, str(failure.get("what", "")))
        for rank, event in {}.items() if of_nodes else self.exits.items():
            code, t = _time(event, "code") or 0, _time(event) or 0
            if _is_violent(event) and not self._follows_another(rank, t):
                how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
                yield Incident(self._wall(t), self.number, f"worker {rank} {how} {self._where(rank)}")
        if self.outcome == "failed" and not any(_is_violent(event) for event in self.exits.values()):
            yield Incident(self._wall(self.end_t), self.number, f"failed: {self.end.get('reason', '')}")
        skipped = [event for event in self.agent.events if event["kind"] == "skipped"]
        if skipped:
            first, many = skipped[0], f"{len(skipped)} saves" if len(skipped) > 1 else "one save"
            text = f"{many} left out, first at step {first.get('step')}: the one before was still being written"
            yield Incident(self._wall(_time(first) or 0), self.number, text)
        if self.outcome is None and self.failed:
            yield Incident(self._wall(self.end_t), self.number, "the agent vanished without recording an end")
        told = {"agent": self.agent.events} | {f"worker {rank}": story.rest for rank, story in self.ranks.items()}
        for who, events in told.items():
            for event in events:
                words = _in_words(event, who)
                if event["kind"] == "resumed" and self.number > 1 and who == "worker 0":
                    words = self._resumed(event, lost, before)
                if words is not None:
                    yield Incident(self._wall(_time(event) or 0), self.number, words)
        yield from self._raised_by_all()
        yield from self._named_replica(before)

    def _follows_another(self, rank: int, t: int) -> bool:
        """Whether a worker went only because of another: it lost the connection, or was ended with one that hung."""
        raised = [event for event in self.ranks.get(rank, _NO_STORY).rest if event["kind"] == "error"]
        if raised and raised[-1].get("type") == "PeerFailed":
            return True
        hangs = [event for event in self.agent.events if event["kind"] == "hang" and event.get("ends")]
        return any((_time(event) or 0) <= t for event in hangs)

    def _named_replica(self, before: "_Life | None") -> Iterable[Incident]:
        """Tell which replica was at fault, once this attempt has made the doubtful step again."""
        doubts = [event for story in self.ranks.values() for event in story.rest if event["kind"] == "doubt"]
        errors = {} if before is None else before.errors("Corrupted")
        words = blame_replica(errors, doubts) if errors else None
        if words is not None:
            t = _time(doubts[0]) if doubts else self.begin_t
            yield Incident(self._wall(t or 0), self.number, words)

    def errors(self, kind: str) -> dict[int, Event]:
        """What workers raised of a kind, by rank."""
        return {
            rank: event
            for rank, story in self.ranks.items()
            for event in story.rest
            if event["kind"] == "error" and event.get("type") == kind
        }

    def _raised_by_all(self) -> Iterable[Incident]:
        """Tell an error that all workers raise together once, if the agent has not told of it; a name is worth more."""
        rest = (event for story in self.ranks.values() for event in story.rest)
        raised = [event for event in rest if event["kind"] == "error" and event.get("type") in _ALIKE]
        if raised and not any(event["kind"] in ("corrupted", "numbers") for event in self.agent.events):
            event = max(raised, key=lambda event: bool(event.get("tensors")))
            yield Incident(self._wall(_time(event) or 0), self.number, str(event.get("message", "")))

    def _resumed(self, event: Event, lost: int, before: "_Life | None") -> str:
        text = f"resumed after step {event.get('step')}, {lost} step{'s' * (lost != 1)} to redo"
        text += "".join(f"; {key} {_change(pair)}" for key, pair in self._changes().items())
        return text + self._took(self._wall(_time(event) or 0), before)

    def _took(self, wall: float, before: "_Life | None") -> str:
        """Where an agent that started again by itself took the state from, and how long that took."""
        source, lost_at = self.start.get("source"), before.lost_at() if before else None
        if not isinstance(source, str):
            return ""
        where = "" if source == "start" else f"; from {'the object store' if source == 'store' else source}"
        return where + (f", {wall - lost_at:.1f} s after it went down" if lost_at is not None else "")

    def _changes(self) -> Mapping[str, object]:
        changed = self.start.get("recipe_changes")
        return changed if isinstance(changed, dict) else {}

    def _where(self, rank: int) -> str:
        steps = self.ranks.get(rank, _NO_STORY).steps
        return f"after step {steps[-1].get('step')}" if steps else "before its first step"


def _in_words(event: Event, who: str) -> str | None:
    """Return what an event says to people; None for those that say nothing by themselves."""
    match event["kind"]:
        case "error" if event.get("type") not in ("PeerFailed", *_ALIKE):
            return f"{who}: {event.get('message', '')}"
        case kind if kind in _TOLD and who == "agent" and event.get("text"):
            return str(event["text"])
        case "rhythm":
            every, cost = _number(event.get("seconds")), _number(event.get("cost"))
            return f"saving every {every:,.0f} s from now on; each save stalls for {cost:.3f} s"
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


_NO_STORY = _Story([], [], 0)


def _story(record: Record, header: Header) -> _Story:
    """Set a worker's steps apart, and bring what else it recorded to the agent's clock."""
    offset = clock_offset(record.header, header)
    steps = [event for event in record.events if event["kind"] == "step"]
    rest = [event for event in record.events if event["kind"] != "step"]
    return _Story(steps, [e if (t := _time(e)) is None else e | {"t": t + offset} for e in rest], offset)


def _latest(events: Iterable[Event], offset: int = 0) -> int | None:
    return max((t + offset for event in events if (t := _time(event)) is not None), default=None)


def _stand_in(number: int, ranks: Sequence[Record]) -> Record:
    """Return an agent's record where there is none: the allocation is then what its workers' records span."""
    headers = [record.header for record in ranks]
    first = min((h for h in headers if h.wall), key=lambda h: h.wall, default=headers[0])
    return Record(Header(number, "agent", first.wall, first.mono, first.boot, first.host), [])


# -- steps


def _count_steps(lives: Sequence[_Life]) -> tuple[int, dict[int, int]]:
    """Return how many steps count, and by attempt how many older ones it threw away."""
    counted: set[int] = set()
    lost: dict[int, int] = {}
    for life in lives:
        resumed = [s for e in life.leader.rest if e["kind"] == "resumed" and (s := _time(e, "step")) is not None]
        if resumed:
            back = {step for step in counted if step > resumed[-1]}
            lost[life.number] = len(back)
            counted -= back
        counted |= {step for e in life.leader.steps if (step := _time(e, "step")) is not None}
    return len(counted), lost


def _useful_ns(lives: Sequence[_Life], flops_key: str) -> int | None:
    """Return the device time of the kept steps' model FLOPs at peak; None when no attempt knows its peak."""
    useful: float | None = None
    for life in lives:
        facts = [event for event in life.leader.rest if event["kind"] == "facts"]
        flops, peak = (_number(facts[-1].get(key)) if facts else 0.0 for key in (flops_key, "peak_flops"))
        if not flops or peak < 1:
            continue
        tokens = sum(_number(event.get("tokens")) for event in life.leader.steps if _is_kept(event, life.kept))
        useful = (useful or 0.0) + tokens * flops / peak * 1e9
    return None if useful is None else round(useful)


def _number(value: object) -> float:
    """Return a count that makes sense, else 0."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e30 else 0.0


def _is_kept(event: Event, kept: int | None) -> bool:
    step = _time(event, "step")
    return step is not None and (kept is None or step <= kept)
