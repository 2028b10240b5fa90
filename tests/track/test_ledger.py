"""The ledger against hand-worked runs, a tick-by-tick oracle and streams of every kind of damage."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import RunError
from headway.track import ACCOUNTS, Header, Ledger, Record, account, largest_overhead, read_run
from thinned import examples

S = 1_000_000_000


def record(process: str, *events: dict, attempt: int = 1, at: float = 0.0, boot: str = "b") -> Record:
    """A record opened `at` seconds after the agent's."""
    return Record(Header(attempt, process, 1000.0 + at, int((50 + at) * S), boot), list(events))


def ev(kind: str, t: float, **fields: object) -> dict:
    return {"kind": kind, "t": round(t * S), **fields}


def step(number: int, t: float, data: float, compute: float, **fields: object) -> dict:
    return ev("step", t, step=number, data=round(data * S), compute=round(compute * S), **fields)


def seconds(ledger: Ledger) -> dict[str, float]:
    return {name: ns / S for name, ns in ledger.accounts.items() if ns}


def check_balance(ledger: Ledger) -> None:
    """The promise: every account is there, none is negative, and all sums are exact at every level."""
    assert tuple(ledger.accounts) == ACCOUNTS
    assert all(type(ns) is int and ns >= 0 for ns in ledger.accounts.values())
    assert sum(ledger.accounts.values()) == ledger.total_ns
    assert sum(attempt.length_ns * len(attempt.workers) for attempt in ledger.attempts) == ledger.total_ns
    for attempt in ledger.attempts:
        assert attempt.length_ns >= 0
        for worker in attempt.workers:
            assert tuple(worker) == ACCOUNTS
            assert min(worker.values()) >= 0
            assert sum(worker.values()) == attempt.length_ns
    for name in ACCOUNTS:
        assert sum(w[name] for attempt in ledger.attempts for w in attempt.workers) == ledger.accounts[name]


# -- worked by hand


def finished_run() -> list[Record]:
    agent = record(
        "agent",
        ev("attempt", 0, workers=2, device="cpu", from_step=0),
        ev("begin", 0, name="startup"),
        ev("end-span", 2, name="startup"),
        ev("exit", 19, rank=0, code=0),
        ev("exit", 19.5, rank=1, code=0),
        ev("end", 20, outcome="finished", reason="all 3 steps are done"),
    )
    # Rank 0 opens 1 s after the agent: its own 0 is 1 on the agent's clock.
    rank0 = record(
        "rank-0",
        ev("begin", 0, name="startup"),
        ev("end-span", 2, name="startup"),
        ev("resumed", 2, step=0),
        ev("begin", 3, name="compile"),
        ev("end-span", 4, name="compile"),
        step(1, 6, 1, 3, tokens=100),  # data [2, 3], compute [3, 6] around the compilation [3, 4]
        step(2, 9, 0.5, 2, tokens=100),  # a gap [6, 6.5], data [6.5, 7], compute [7, 9]
        ev("begin", 9, name="evaluation"),
        ev("end-span", 11, name="evaluation"),
        step(3, 14, 1, 2, tokens=100),
        ev("begin", 14, name="shutdown"),
        ev("begin", 14, name="checkpoint"),
        ev("end-span", 17, name="checkpoint"),
        ev("end-span", 18, name="shutdown"),
        at=1,
    )
    rank1 = record("rank-1", step(1, 7, 1, 3), step(2, 10, 0, 2.5), step(3, 15, 0, 2.5))
    return [agent, rank0, rank1]


def test_ledger_of_finished_run():
    ledger = account(finished_run())
    check_balance(ledger)
    assert ledger.total_ns == 40 * S
    rank0, rank1 = ({name: ns / S for name, ns in worker.items() if ns} for worker in ledger.attempts[0].workers)
    assert rank0 == {
        "start-up": 3,
        "compile": 1,
        "data stall": 2.5,
        "compute": 6,
        "evaluation": 2,
        "checkpoint stall": 3,
        "shut-down": 2,
        "unattributed": 0.5,
    }
    # The agent's start-up covers worker 1 too; what neither recorded is nobody's.
    assert rank1 == {
        "start-up": 2,
        "data stall": 1,
        "compute": 8,
        "shut-down": 0.5,
        "unattributed": 20 - 2 - 1 - 8 - 0.5,
    }
    assert ledger.steps == 3
    assert ledger.lost_steps == 0
    assert ledger.incidents == ()
    assert ledger.attempts[0].outcome == "finished"
    assert ledger.share("compute") == 14 / 40


def killed_and_resumed() -> list[Record]:
    first = [
        record(
            "agent",
            ev("attempt", 0, workers=2, device="cpu", from_step=0),
            ev("exit", 10, rank=1, code=-9),
            ev("exit", 10.5, rank=0, code=1),
            ev("end", 11, outcome="failed", reason="worker 1 was killed"),
        ),
        record(
            "rank-0",
            ev("begin", 0, name="startup"),
            ev("end-span", 1, name="startup"),
            ev("resumed", 1, step=0),
            *(step(n, 1 + 2 * n, 0.5, 1.5) for n in (1, 2, 3, 4)),
            ev("error", 10.2, type="RuntimeError", message="connection closed by peer"),
        ),
        record(
            "rank-1",
            ev("begin", 0, name="startup"),
            ev("end-span", 1, name="startup"),
            *(step(n, 1 + 2 * n, 0.5, 1.5) for n in (1, 2, 3, 4)),
        ),
    ]
    second = [
        record(
            "agent",
            ev("attempt", 0, workers=2, device="cpu", from_step=2),
            ev("end", 10, outcome="finished", reason="done"),
            attempt=2,
            at=100,
        ),
        *(
            record(
                f"rank-{rank}",
                ev("begin", 0, name="startup"),
                ev("begin", 1, name="restore"),
                ev("end-span", 2, name="restore"),
                ev("end-span", 2, name="startup"),
                *([ev("resumed", 2, step=2)] if rank == 0 else []),
                *(step(n, 2 * n - 2, 0, 2) for n in (3, 4, 5, 6)),
                attempt=2,
                at=100,
            )
            for rank in range(2)
        ),
    ]
    return first + second


def test_ledger_of_killed_worker():
    ledger = account(killed_and_resumed())
    check_balance(ledger)
    rank0, rank1 = ({n: ns / S for n, ns in w.items() if ns} for w in ledger.attempts[0].workers)
    # Steps 3 and 4 (4 s) were thrown away, and so was the step under way: [9, 10.5] and [9, 10].
    assert rank0 == {"start-up": 1, "data stall": 1, "compute": 3, "rework": 5.5, "restart": 0.5}
    assert rank1 == {"start-up": 1, "data stall": 1, "compute": 3, "rework": 5, "restart": 1}
    for worker in ledger.attempts[1].workers:
        assert {n: ns / S for n, ns in worker.items() if ns} == {"restart": 2, "compute": 8}
    assert (ledger.steps, ledger.lost_steps) == (6, 2)
    assert [incident.text for incident in ledger.incidents] == [
        "worker 1 was killed by signal 9 after step 4",
        "worker 0: connection closed by peer",
        "worker 0 exited with status 1 after step 4",
        "resumed after step 2, 2 steps to redo",
    ]
    assert [round(i.wall, 3) for i in ledger.incidents] == [1010.0, 1010.2, 1010.5, 1102.0]
    assert ledger.attempts[1].resumed_from == 2


def hung(*more: dict, **hang: object) -> list[Record]:
    """Both steps took 2 s; worker 1 stands still from 5 on, which the agent says at 9; they are gone at 9.5 and 10."""
    agent = record(
        "agent",
        ev("attempt", 0, workers=2, device="cpu", from_step=0),
        ev("hang", 9, rank=1, step=3, phase="data", seconds=4.0, line="", text="worker 1 hangs", ends=True) | hang,
        ev("exit", 9.5, rank=1, code=-9),
        ev("exit", 10, rank=0, code=-9),
        ev("end", 11, outcome="failed", reason="worker 1 hangs"),
    )
    steps = [step(n, 2 * n, 0.5, 1.5) for n in (1, 2)]
    return [agent, record("rank-0", *steps, *more), record("rank-1", *steps)]


def test_ledger_of_hang_counts_detection_time():
    ledger = account(hung())
    check_balance(ledger)
    rank0, rank1 = ({n: ns / S for n, ns in w.items() if ns} for w in ledger.attempts[0].workers)
    # From the end of step 2, at 4, to 9; from there to the end of the attempt it is brought back.
    assert rank0 == {"data stall": 1, "compute": 3, "detection": 5, "restart": 2}
    assert rank1 == {"data stall": 1, "compute": 3, "detection": 5, "restart": 2}
    assert ledger.incidents[0].text == "worker 1 hangs"
    assert ledger.incidents[0].wall == 1009
    assert "Timeouts follow the run's own step times" in largest_overhead(ledger).advice


def test_hang_that_did_not_end_the_attempt_is_only_an_incident():
    ledger = account(hung(ends=False))
    assert seconds(ledger) == {"data stall": 2, "compute": 6, "rework": 11.5, "restart": 2.5}
    assert ledger.incidents[0].text == "worker 1 hangs"


def test_open_span_counts_until_marks_stopped():
    """An evaluation begun at 4.5 was still going at 5, when everything stood still."""
    rank0 = account(hung(ev("begin", 4.5, name="evaluation"))).attempts[0].workers[0]
    assert {n: ns / S for n, ns in rank0.items() if ns} == {
        "data stall": 1, "compute": 3, "unattributed": 0.5, "evaluation": 0.5, "detection": 4, "restart": 2
    }  # fmt: skip
    later = account(hung(ev("begin", 6, name="evaluation"))).attempts[0].workers[0]
    assert {n: ns / S for n, ns in later.items() if ns} == {
        "data stall": 1, "compute": 3, "unattributed": 2, "detection": 3, "restart": 2
    }  # fmt: skip


def test_worker_that_kept_recording_while_another_hung():
    """Its step ended after the hang was told of; that was work, and then it was ended."""
    rank0 = account(hung(step(3, 9.25, 0.25, 5))).attempts[0].workers[0]
    assert {n: ns / S for n, ns in rank0.items() if ns} == {
        "data stall": 1.25, "compute": 8, "restart": 1.75
    }  # fmt: skip


def test_hang_before_first_step():
    agent = record(
        "agent", ev("attempt", 0, workers=1), ev("hang", 8, seconds=5.0, ends=True, text="hangs"),
        ev("exit", 9, rank=0, code=-9), ev("end", 10, outcome="failed"),
    )  # fmt: skip
    assert seconds(account([agent, record("rank-0", ev("begin", 1, name="startup"))])) == {
        "unattributed": 1, "start-up": 2, "detection": 5, "restart": 2
    }  # fmt: skip


def test_replica_comparison_counts_as_detection():
    agent = record("agent", ev("attempt", 0, workers=1), ev("end", 10, outcome="finished"))
    rank = record("rank-0", step(1, 4, 0, 4), ev("begin", 4, name="compare"), ev("end-span", 6, name="compare"))
    assert seconds(account([agent, rank])) == {"compute": 4, "detection": 2, "unattributed": 4}


def test_agent_texts_become_incidents():
    kinds = ("straggler", "hang", "woken", "adopted", "corrupted", "numbers")
    events = [ev(kind, n, rank=1, text=f"{kind}: told") for n, kind in enumerate(kinds)]
    agent = record("agent", ev("attempt", 0, workers=1), *events, ev("hang", 7), ev("end", 10, outcome="finished"))
    ledger = account([agent, record("rank-0", ev("hang", 8, text="no agent's word"))])
    assert [(i.text, i.wall) for i in ledger.incidents] == [(f"{k}: told", 1000 + n) for n, k in enumerate(kinds)]


@pytest.mark.parametrize("kind", ["BadNumbers", "Corrupted"])
def test_error_raised_by_all_workers_is_one_incident(kind):
    def error(rank: int, **facts: object) -> Record:
        return record(f"rank-{rank}", ev("error", 3 + rank, type=kind, message=f"seen by {rank}", **facts))

    def texts(*more: dict) -> list[str]:
        agent = record("agent", ev("attempt", 0, workers=3), *more, ev("end", 10, outcome="finished"))
        return [i.text for i in account([agent, error(0, tensors=[]), error(1, tensors=["w"]), error(2)]).incidents]

    assert texts() == ["seen by 1"]  # who can name what differs is heard first
    assert texts(ev("corrupted", 5, text="worker 1 is at fault")) == ["worker 1 is at fault"]
    assert texts(ev("numbers", 5, text="back to 2")) == ["back to 2"]


def test_only_the_unfinished_step_is_rework_until_resumed():
    ledger = account(killed_and_resumed()[:3])
    assert seconds(ledger) == {"start-up": 2, "data stall": 4, "compute": 12, "rework": 2.5, "restart": 1.5}
    assert ledger.lost_steps == 0


def test_allocation_of_killed_agent_ends_with_last_event_of_any_process():
    records = [
        record("agent", ev("attempt", 1, workers=1, device="cpu")),
        record("rank-0", ev("begin", 1, name="startup"), step(1, 6, 1, 2), at=0.5),
    ]
    running = account(records)
    # Allocation [1, 6.5]; startup begins at 1.5 and never ends, the step lies inside it.
    assert seconds(running) == {"start-up": 2, "data stall": 1, "compute": 2, "unattributed": 0.5}
    assert running.attempts[0].outcome is None
    check_balance(running)


@pytest.mark.parametrize("place", ["data", "checkpoint", "evaluation"])
def test_injected_stall_is_charged_to_its_account(place):
    def run(stall: float) -> Ledger:
        events, t = [], 0.0
        for n in range(1, 11):
            data = 0.1 + (stall if place == "data" and n == 5 else 0)
            t += data + 1
            events.append(step(n, t, data, 1))
            if n == 5 and place != "data":
                events += [ev("begin", t, name=place), ev("end-span", t + 0.2 + stall, name=place)]
                t += 0.2 + stall
        return account([record("agent", ev("attempt", 0, workers=1), ev("end", t)), record("rank-0", *events)])

    name = {"data": "data stall", "checkpoint": "checkpoint stall"}.get(place, place)
    quiet, stalled = run(0.0), run(2.0)
    assert stalled.accounts[name] - quiet.accounts[name] == 2 * S
    assert all(stalled.accounts[other] == quiet.accounts[other] for other in ACCOUNTS if other != name)
    loss = largest_overhead(stalled)
    assert loss is not None
    assert loss[:2] == (name, stalled.seconds(name))
    assert loss.advice


def test_other_hosts_are_aligned_by_wall_time():
    records = [
        record("agent", ev("attempt", 0, workers=1), ev("end", 10, outcome="finished")),
        Record(Header(1, "rank-0", wall=1004.0, mono=77, boot="other"), [step(1, 3, 0, 2)]),
    ]
    # Its 3 s is the agent's 7 s; had the monotonic clocks been compared, it would lie outside the allocation.
    assert seconds(account(records)) == {"compute": 2, "unattributed": 8}


def test_useful_time_is_model_flops_at_peak_rate():
    facts = ev("facts", 0, flops_per_token=600, flops_per_token_full_attention=750, peak_flops=1e4, peak_source="x")
    records = [
        record("agent", ev("attempt", 0, workers=2), ev("end", 20)),
        record("rank-0", facts, step(1, 8, 0, 8, tokens=100), step(2, 16, 2, 6, tokens=100)),
        record("rank-1", step(1, 8, 0, 8), step(2, 16, 2, 6)),
    ]
    ledger = account(records)
    # 200 tokens x 600 FLOPs at 10,000 FLOP/s a device: 12 device-seconds of the 32 that the steps took.
    assert ledger.useful_ns == 12 * S
    assert ledger.useful_full_attention_ns == 15 * S
    assert ledger.mfu == 12 / 32
    assert ledger.mfu_full_attention == 15 / 32
    later = [record("agent", ev("attempt", 0, workers=2), ev("end", 1), attempt=2, at=30)]
    later.append(record("rank-0", ev("resumed", 0.5, step=1), attempt=2, at=30))
    assert account(records + later).useful_ns == 6 * S
    unknown = record("rank-0", facts | {"peak_flops": None}, step(1, 8, 0, 8, tokens=100))
    assert account([records[0], unknown]).useful_ns is None
    assert account([records[0], unknown]).mfu is None


def test_span_end_closes_nested_spans():
    events = [
        ev("begin", 1, name="checkpoint"),
        ev("begin", 2, name="evaluation"),
        ev("end-span", 5, name="checkpoint"),
    ]
    agent = record("agent", ev("attempt", 0, workers=1), ev("end", 10, outcome="finished"))
    assert seconds(account([agent, record("rank-0", *events)])) == {
        "checkpoint stall": 1,
        "evaluation": 3,
        "unattributed": 6,
    }


def test_open_span_ends_with_its_worker():
    agent = record(
        "agent", ev("attempt", 0, workers=1), ev("exit", 6, rank=0, code=-9), ev("end", 10, outcome="failed")
    )
    rank = record("rank-0", step(1, 2, 0, 2), ev("begin", 3, name="checkpoint"))
    assert seconds(account([agent, rank])) == {
        "compute": 2,
        "unattributed": 1,
        "checkpoint stall": 3,
        "restart": 4,
    }


def test_lost_events_leave_their_time_unattributed():
    """Also under a span whose end was lost: the worker's 0 is 1 on the agent's clock."""
    agent = record(
        "agent", ev("attempt", 0, workers=1), ev("exit", 14, rank=0, code=0), ev("end", 14, outcome="finished")
    )
    rank = record(
        "rank-0",
        step(1, 2, 0, 3),  # from 0 to 3 on the agent's clock
        ev("begin", 2, name="checkpoint"),
        ev("lost", 9, since=4 * S, events=7, text="7 events were lost"),
        step(9, 12, 0, 3),
        ev("end-span", 13, name="checkpoint"),
        at=1,
    )
    ledger = account([agent, rank])
    check_balance(ledger)
    assert seconds(ledger) == {"compute": 6, "checkpoint stall": 3, "unattributed": 5}
    assert [incident.text for incident in ledger.incidents] == ["worker 0: 7 events were lost"]


def outage(begin: float, end: float | None = None) -> list[dict]:
    events = [ev("storage", begin, text="full", works=False)]
    return events if end is None else [*events, ev("storage", end, text="", works=True)]


@pytest.mark.parametrize(
    ("events", "advice"),
    [
        ([], "Save less often"),
        ([ev("retry", 5, message="No space left")], "storage that had failed"),
        (outage(3), "storage that had failed"),
        (outage(3, 9), "storage that had failed"),
        (outage(3, 4.5), "Save less often"),
        (outage(1, 3), "Save less often"),
    ],
)
def test_wait_for_storage_is_not_blamed_on_frequent_saves(events, advice):
    """The agent writes the last state from 4 to 12; its devices wait for it."""
    agent = record(
        "agent",
        ev("attempt", 0, workers=2),
        *[event for event in events if event["t"] < 4 * S],
        ev("begin", 4, name="checkpoint"),
        *[event for event in events if event["t"] > 4 * S],
        ev("end-span", 12, name="checkpoint"),
        ev("end", 12, outcome="stopped"),
    )
    ledger = account([agent, *(record(f"rank-{rank}", step(1, 4, 0, 4)) for rank in (0, 1))])
    check_balance(ledger)
    assert seconds(ledger) == {"compute": 8, "checkpoint stall": 16}
    assert advice in largest_overhead(ledger).advice


def test_agent_that_could_not_record_its_end_has_not_vanished():
    first = record("agent", ev("attempt", 0, workers=1), *outage(3), ev("kept", 5, step=2))
    second = record("agent", ev("attempt", 0, workers=1), ev("end", 5, outcome="finished"), attempt=2, at=60)
    ledger = account([first, second])
    assert [incident.text for incident in ledger.incidents] == ["full", "no end was recorded: the storage had failed"]
    assert [attempt.ended_in_outage for attempt in ledger.attempts] == [True, False]


@pytest.mark.parametrize(("code", "name"), [(-9, "rework"), (1, "rework"), (75, "unattributed"), (0, "unattributed")])
def test_immediate_stop_loses_the_unfinished_step_and_a_regular_one_does_not(code, name):
    agent = record(
        "agent",
        ev("attempt", 0, workers=1),
        ev("exit", 8, rank=0, code=code),
        ev("end", 10, outcome="stopped", reason="asked to"),
    )
    ledger = account([agent, record("rank-0", step(1, 5, 1, 4))])
    assert seconds(ledger) == {"data stall": 1, "compute": 4, name: 3, "shut-down": 2}
    assert len(ledger.incidents) == (code in (-9, 1))


def test_ledger_without_worker_or_agent_records():
    agent = record("agent", ev("attempt", 0, workers=3), ev("end", 4, outcome="failed"))
    alone = account([agent, record("rank-1", step(1, 2, 1, 1))])
    check_balance(alone)
    assert alone.total_ns == 12 * S
    orphan = account([record("rank-0", step(1, 5, 1, 4)), record("rank-1", step(1, 6, 1, 4), at=2)])
    check_balance(orphan)
    # Two workers from the first record's opening to the last event, at 2 + 6 s.
    assert orphan.total_ns == 16 * S
    assert seconds(orphan) == {"data stall": 2, "compute": 8, "unattributed": 6}


def test_ledger_of_no_records_is_empty():
    ledger = account([])
    check_balance(ledger)
    assert ledger.total_ns == 0
    assert ledger.share("compute") == 0.0
    assert largest_overhead(ledger) is None


# -- a tick-by-tick oracle: programs run on a fake clock, every millisecond is asked what it was

MS = 1_000_000
NAMES = {
    "startup": "start-up",
    "restore": "start-up",
    "compile": "compile",
    "checkpoint": "checkpoint stall",
    "evaluation": "evaluation",
    "compare": "detection",
    "shutdown": "shut-down",
}

tiny = st.integers(0, 3)
steps_ = st.tuples(st.just("step"), tiny, tiny, tiny)  # idle, data, compute
compiled = st.tuples(st.just("compiled"), tiny, tiny, st.integers(1, 3), st.integers(1, 3))
idles = st.tuples(st.just("idle"), tiny)
phases = st.sampled_from(["startup", "restore", "compile", "checkpoint", "evaluation", "compare"])


def programs(leaf: st.SearchStrategy) -> st.SearchStrategy:
    nested = st.recursive(
        leaf, lambda inner: st.tuples(st.just("span"), phases, st.lists(inner, max_size=3)), max_leaves=5
    )
    return st.lists(nested, max_size=6)


attempts_ = st.fixed_dictionaries(
    {
        "workers": st.lists(
            st.tuples(programs(st.one_of(steps_, compiled, idles)), st.booleans(), st.integers(0, 40)),
            max_size=3,
        ),
        "agent": programs(idles),
        "outcome": st.sampled_from(["finished", "stopped", "failed", None]),
        "exits": st.booleans(),
        "code": st.sampled_from([0, 75, 1, -9]),
        "after": st.integers(0, 5),
        "back": st.integers(0, 4),
        "offset": st.integers(-3, 5),
        "same_boot": st.booleans(),
        "hang": st.none() | st.tuples(st.integers(0, 40), st.integers(0, 8)),  # when it was told, and seen since
    }
)


class Process:
    """Runs a program: keeps the events it would record, and by a separate path what each moment truly was."""

    def __init__(self, first_step: int, until: int | None) -> None:
        self.now, self.step, self.until = 0, first_step, until
        self.events: list[tuple[int, dict]] = []
        self.truth: list[tuple[int, int | None, str, int, int | None]] = []  # begin, end, what, depth, step

    def emit(self, kind: str, **fields: object) -> bool:
        seen = self.until is None or self.now <= self.until
        if seen:
            self.events.append((self.now, {"kind": kind, **fields}))
        return seen

    def span(self, name: str, depth: int, body: list) -> None:
        begun, begin = self.emit("begin", name=name), self.now
        for op in body:
            self.run(op, depth + 1)
        ended = self.emit("end-span", name=name)
        if begun:
            self.truth.append((begin, self.now if ended else None, name, depth, None))

    def take_step(self, data: int, compute: int, depth: int) -> None:
        self.step += 1
        if self.emit("step", step=self.step, data=data * MS, compute=compute * MS):
            self.truth.append((self.now - compute - data, self.now - compute, "data", depth, self.step))
            self.truth.append((self.now - compute, self.now, "compute", depth, self.step))

    def run(self, op: tuple, depth: int = 0) -> None:
        match op:
            case ("idle", gap):
                self.now += gap
            case ("span", name, body):
                self.span(name, depth, body)
            case ("step", gap, data, compute):
                self.now += gap + data + compute
                self.take_step(data, compute, depth)
            case ("compiled", data, before, inside, after):
                self.now += data + before
                self.span("compile", depth + 1, [("idle", inside)])
                self.now += after
                self.take_step(data, before + inside + after, depth)


class Life:
    """One attempt of the oracle: processes on the agent's clock in ms, and what each ms was."""

    def __init__(self, number: int, plan: dict, resumed: int) -> None:
        self.number, self.plan = number, plan
        self.agent = Process(0, None)
        for op in plan["agent"]:
            self.agent.run(op)
        self.workers = []
        for rank, (program, killed, when) in enumerate(plan["workers"]):
            process = Process(resumed, when if killed else None)
            if rank == 0:
                process.emit("resumed", step=resumed)
            for op in program:
                process.run(op)
            process.gone = min(process.now, when) if killed else process.now
            self.workers.append(process)
        self.offset = plan["offset"]
        self.ended = plan["outcome"] is not None
        stop = max([self.agent.now, 0] + [worker.gone + self.offset for worker in self.workers])
        times = [t for t, _ in self.agent.events] + [0]
        times += [t + self.offset for worker in self.workers for t, _ in worker.events]
        if plan["exits"]:
            times += [max(worker.gone + self.offset, 0) for worker in self.workers]
        if plan["hang"]:
            times.append(plan["hang"][0])
        self.end = stop + plan["after"] if self.ended else max(times)

    @property
    def last_step(self) -> int | None:
        steps = [e["step"] for _, e in self.workers[0].events if e["kind"] == "step"] if self.workers else []
        return steps[-1] if steps else None

    def exit_of(self, worker: Process) -> int | None:
        return max(worker.gone + self.offset, 0) if self.plan["exits"] else None

    def records(self) -> list[Record]:
        base, zero = 1000.0 * self.number, 9_000 * MS * self.number
        events = [(0, {"kind": "attempt", "workers": len(self.workers), "device": "cpu"}), *self.agent.events]
        if self.plan["exits"]:
            events += [
                (self.exit_of(worker), {"kind": "exit", "rank": rank, "code": self.plan["code"]})
                for rank, worker in enumerate(self.workers)
            ]
        if self.plan["hang"]:
            hang_t, waited = self.plan["hang"]
            events.append((hang_t, {"kind": "hang", "ends": True, "seconds": waited / 1000}))
        if self.ended:
            events.append((self.end, {"kind": "end", "outcome": self.plan["outcome"], "reason": ""}))
        header = Header(self.number, "agent", base, zero, "boot")
        records = [Record(header, [{**event, "t": t * MS} for t, event in events])]
        for rank, worker in enumerate(self.workers):
            same = self.plan["same_boot"]
            mono = zero + self.offset * MS if same else 123
            wall = base - 500 if same else base + self.offset / 1000
            header = Header(self.number, f"rank-{rank}", wall, mono, "boot" if same else "elsewhere")
            records.append(Record(header, [{**event, "t": t * MS} for t, event in worker.events]))
        return records

    def what(self, rank: int, tick: int, failed: bool, kept: int | None) -> str:
        """Say what one millisecond of one worker was, straight from the rules."""
        worker = self.workers[rank]
        gone = self.exit_of(worker)
        if gone is not None and tick >= gone:
            there = [(depth, name) for begin, end, name, depth, _ in self.agent.truth if begin <= tick < end]
            if failed and there and max(there)[1] == "checkpoint":
                return "checkpoint stall"
            return "restart" if failed else "shut-down"
        upto = self.end if gone is None else min(gone, self.end)
        best = (-1, "")
        last = None
        hang_t, waited = self.plan["hang"] or (None, 0)
        for begin, end, name, depth, number in worker.truth:
            last_t = max(t for t, _ in worker.events) + self.offset
            stood = upto if hang_t is None else max(min(upto, max(hang_t - waited, last_t)), begin + self.offset)
            begin, end = begin + self.offset, stood if end is None else end + self.offset
            last = end if last is None else max(last, end)
            if begin <= tick < end and depth > best[0]:
                lost = number is not None and kept is not None and number > kept
                best = (depth, "rework" if lost else self.name(name))
        if best[1]:
            return best[1]
        if hang_t is not None and last is not None and tick >= last:
            return "detection" if tick < hang_t else "restart"
        stepped = any(name == "compute" for _, _, name, _, _ in worker.truth)
        violent = self.plan["exits"] and self.plan["code"] in (1, -9)
        if hang_t is None and (failed or violent) and stepped and tick >= last:
            return "rework"
        for begin, end, name, depth, _ in self.agent.truth:
            if begin <= tick < end and depth > best[0]:
                best = (depth, self.name(name))
        return best[1] or "unattributed"

    def name(self, what: str) -> str:
        if what in ("startup", "restore") and self.number > 1:
            return "restart"
        return {"data": "data stall", "compute": "compute"}.get(what) or NAMES[what]


@given(st.lists(attempts_, min_size=1, max_size=3))
@settings(max_examples=examples(80), deadline=None)
def test_accounts_match_the_oracle_per_millisecond(plans):
    lives: list[Life] = []
    for number, plan in enumerate(plans, 1):
        reached = next((life.last_step for life in reversed(lives) if life.last_step is not None), 0)
        lives.append(Life(number, plan, max(reached - plan["back"], 0) if number > 1 else 0))
    records = [record for life in lives for record in life.records()]
    resumed = {
        life.number: [e["step"] for _, e in life.workers[0].events if e["kind"] == "resumed"]
        for life in lives
        if life.workers
    }
    want = dict.fromkeys(ACCOUNTS, 0)
    for life in lives:
        later = [steps[-1] for number, steps in resumed.items() if number > life.number and steps]
        failed = life.plan["outcome"] == "failed" or (not life.ended and life is not lives[-1])
        for rank in range(len(life.workers)):
            for tick in range(life.end):
                want[life.what(rank, tick, failed, min(later, default=None))] += MS
    ledger = account(records)
    check_balance(ledger)
    assert dict(ledger.accounts) == want


# -- streams with every kind of damage

times = st.one_of(st.integers(-10, 200), st.sampled_from([None, "x", 1.5, 10**400, -(10**25), True, [], {}]))
fields = {
    "t": times,
    "since": times,
    "works": st.sampled_from([True, False, None, 3]),
    "name": st.sampled_from(["startup", "restore", "compile", "checkpoint", "evaluation", "shutdown", "?", 3, None]),
    "step": times,
    "data": times,
    "compute": times,
    "rank": st.one_of(st.integers(-1, 4), times),
    "code": times,
    "workers": st.one_of(st.integers(-2, 4), st.sampled_from([None, "2", 1.5])),
    "outcome": st.sampled_from(["finished", "failed", "stopped", None, 3]),
    "tokens": st.one_of(times, st.floats()),
    "flops_per_token": st.one_of(times, st.floats()),
    "peak_flops": st.one_of(times, st.floats()),
    "reason": st.one_of(st.none(), st.text(max_size=5)),
    "ends": st.sampled_from([True, True, False, None, 1]),
    "seconds": st.one_of(times, st.floats()),
    "text": st.sampled_from(["x", "", None, 3, ["x"]]),
    "type": st.sampled_from(["BadNumbers", "Corrupted", "PeerFailed", None, []]),
    "tensors": st.sampled_from([["w"], [], None, 3]),
}
kinds = st.sampled_from(
    [
        "attempt",
        "worker",
        "exit",
        "end",
        "begin",
        "end-span",
        "step",
        "resumed",
        "facts",
        "error",
        "log",
        "hang",
        "numbers",
        "straggler",
        "storage",
        "lost",
        "other",
    ]
)
events_ = st.builds(lambda kind, rest: {"kind": kind, **rest}, kinds, st.fixed_dictionaries({}, optional=fields))
headers = st.builds(
    Header,
    attempt=st.integers(0, 3),
    process=st.sampled_from(["agent", "agent", "rank-0", "rank-1", "rank-2", "rank-x", "other"]),
    wall=st.one_of(st.just(0.0), st.floats(0, 3000), st.floats(-1e11, 1e11)),
    mono=st.one_of(st.integers(-50, 200), st.integers(-(2**70), 2**70)),
    boot=st.sampled_from(["", "a", "b"]),
)
streams = st.lists(st.builds(Record, headers, st.lists(events_, max_size=12)), max_size=8)


@given(streams)
@settings(max_examples=examples(60), deadline=None)
def test_accounts_of_any_event_stream_sum_to_total(records):
    ledger = account(records)
    check_balance(ledger)
    assert ledger.useful_ns is None or ledger.useful_ns >= 0
    assert ledger.steps >= 0
    largest_overhead(ledger)


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_accounts_of_damaged_records_sum_to_total(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    (folder / "events").mkdir()
    for record in killed_and_resumed():
        header = record.header
        opening = {"kind": "open", "format": 1, **vars(header)}
        text = "".join(json.dumps(row) + "\n" for row in [opening, *record.events]).encode()
        damage = data.draw(st.sampled_from(["none", "missing", "torn", "hole", "lines lost", "bytes"]))
        rows = text.splitlines(keepends=True)
        if damage == "missing":
            continue
        if damage == "torn":
            text = text[: data.draw(st.integers(0, len(text)))]
        elif damage == "hole":
            at = data.draw(st.integers(0, len(text)))
            text = text[:at] + b"\0" * 30 + text[at + 30 :]
        elif damage == "lines lost":
            keep = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
            text = b"".join(row for row, kept in zip(rows, keep, strict=True) if kept)
        elif damage == "bytes":
            for at in data.draw(st.lists(st.integers(0, len(text) - 1), max_size=6)):
                text = text[:at] + bytes([data.draw(st.integers(0, 255))]) + text[at + 1 :]
        (folder / "events" / f"{header.attempt:04d}-{header.process}.jsonl").write_bytes(text)
    try:
        records = read_run(folder)
    except RunError:  # a flipped digit may make a newer format of it
        return
    check_balance(account(records))


def test_peak_that_steps_exceed_gives_no_utilization() -> None:
    """The peak of a CPU was measured while other processes had its cores."""
    for useful_ns, mfu in ((50, 0.5), (100, 1.0), (209, None)):
        accounts = dict.fromkeys(ACCOUNTS, 0) | {"compute": 90, "data stall": 10}
        ledger = replace(account([]), accounts=accounts, useful_ns=useful_ns, useful_full_attention_ns=2 * useful_ns)
        assert ledger.mfu == mfu
        assert ledger.peak_too_low is (mfu is None)
        assert (ledger.mfu_full_attention is None) is (mfu is None)
