"""What the end of an attempt is called, from exits, hangs and the workers' own records, all written by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.agent import Attempt, AttemptOutcome
from headway.agent.supervise.failures import (
    AttemptEnd,
    as_fields,
    classify_failure,
    collateral_ranks,
    failures_before,
    last_step,
)
from headway.agent.supervise.hang_detector import Stall
from headway.agent.supervise.outcome import explain_exit
from headway.agent.supervise.recover import Failure
from headway.agent.supervise.worker_monitor import LostWorker
from headway.agent.workers.worker_group import WorkerExit
from headway.errors import StateError
from headway.track import RunFolder, read_run

PEER = {"kind": "error", "type": "PeerFailed", "message": "lost the connection to another worker", "hint": None}
LOST = LostWorker(Stall(1, 9, "optimizer", 0, 6.0, 2.5, others_wait=True), "worker 1 is hung in step 9, optimizer (sleeping)")


def write(run: Path, attempt: int, process: str, *events: dict[str, Any]) -> None:
    """A record, as a process leaves it."""
    (run / "events").mkdir(exist_ok=True)
    opening = {"kind": "open", "format": 1, "attempt": attempt, "process": process, "wall": 1.0, "mono": 1, "boot": "b"}
    lines = [opening | {"host": "h", "pid": 1}, *({"t": number, **event} for number, event in enumerate(events))]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "events" / f"{attempt:04d}-{process}.jsonl").write_text(text)


def steps(last: int, first: int = 1) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": step, "data": 1, "compute": 1} for step in range(first, last + 1)]


def error(kind: str = "WorkerError", message: str = "ValueError: oh", place: str = "own.py:7", **facts: Any) -> dict:
    return {"kind": "error", "type": kind, "message": message, "hint": None, "place": place, **facts}


def attempt_in(run: Path, **more: Any) -> Attempt:
    return Attempt(run=run, number=2, workers=2, device="cpu", threads=1, **more)


def named(run: Path, ended: AttemptEnd, kept: int = -1, stops: int = 0, **more: Any) -> Failure:
    """What the agent makes of an end: as it does it."""
    attempt = attempt_in(run, **more)
    ended.bystanders |= collateral_ranks(attempt)
    outcome = explain_exit(RunFolder(run), attempt.number, ended, stops)
    return classify_failure(attempt, ended, outcome, kept)


def exits(*codes: tuple[int, int], **more: Any) -> AttemptEnd:
    """Ranks and codes in the order in which they ended."""
    return AttemptEnd([WorkerExit(rank, 100 + rank, code) for rank, code in codes], **more)


# -- what it is called


def test_a_worker_that_was_killed(tmp_path: Path) -> None:
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    write(tmp_path, 2, "rank-1", *steps(8))
    found = named(tmp_path, exits((1, -9), (0, 1)))
    assert replace(found, at=0) == Failure(
        "died", "worker 1 was killed by signal 9 (SIGKILL)", step=9, reached=8, place="SIGKILL", rank=1
    )
    assert found.at > 1e9, "on the clock that people have"


def test_what_a_death_makes_others_raise_is_not_the_cause(tmp_path: Path) -> None:
    """Not every way in which a worker notices that another is gone has a name."""
    write(tmp_path, 2, "rank-0", *steps(8), error(message="RuntimeError: something broke", place="torch.py:1"))
    write(tmp_path, 2, "rank-1", *steps(8))
    found = named(tmp_path, exits((1, -9), (0, 1)))
    assert (found.cause, found.what, found.rank) == ("died", "worker 1 was killed by signal 9 (SIGKILL)", 1)


def test_a_worker_that_left_without_a_word(tmp_path: Path) -> None:
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    found = named(tmp_path, exits((1, 3), (0, 1)))
    assert (found.cause, found.what, found.place) == ("died", "worker 1 exited with status 3", "status 3")


@pytest.mark.parametrize(("code", "how"), [(-9, "was killed by signal 9 (SIGKILL)"), (3, "exited with status 3")])
def test_whoever_was_left_behind_is_not_blamed_though_heard_of_first(tmp_path: Path, code: int, how: str) -> None:
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    write(tmp_path, 2, "rank-1", *steps(8))
    found = named(tmp_path, exits((0, 1), (1, code)))
    assert (found.cause, found.what, found.rank) == ("died", f"worker 1 {how}", 1)


def test_whom_the_agent_ended_is_not_blamed(tmp_path: Path) -> None:
    """A connection broke by itself: there is only the worker that says so."""
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    write(tmp_path, 2, "rank-1", *steps(8))
    found = named(tmp_path, exits((0, 1), (1, -9), bystanders={1}))
    assert (found.cause, found.what, found.rank) == ("died", "worker 0 exited with status 1", 0)


@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_that_raised(tmp_path: Path, first: int) -> None:
    """Whoever went first: the other has only lost its connection."""
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    write(tmp_path, 2, "rank-1", *steps(7), error())
    found = named(tmp_path, exits((first, 1), (1 - first, 1)))
    assert (found.cause, found.what) == ("raised", "worker 1 failed: ValueError: oh")
    assert (found.step, found.reached, found.place) == (9, 8, "own.py:7")


@pytest.mark.parametrize(
    ("last", "more", "cause"),
    [
        (0, {}, "other"),  # before the first step of a new run
        (1, {}, "raised"),
        (5, {"from_step": 5}, "other"),  # before the first step of a resumed one
        (6, {"from_step": 5}, "raised"),
        (5, {"from_step": 5, "source": "memory"}, "raised"),  # which has got further before
    ],
)
def test_an_error_before_the_first_step_is_a_mistake(tmp_path: Path, last: int, more: dict, cause: str) -> None:
    write(tmp_path, 2, "rank-0", *steps(last, more.get("from_step", 0) + 1), error())
    assert named(tmp_path, exits((0, 1), (1, -9)), **more).cause == cause


@pytest.mark.parametrize("message", ["out of memory", "worse"])
def test_known_errors_come_again(tmp_path: Path, message: str) -> None:
    kind = "WorkerError" if message == "out of memory" else "StateError"
    write(tmp_path, 2, "rank-0", *steps(8), error(kind, message))
    assert named(tmp_path, exits((0, 1), (1, 1))).cause == "other"


def test_a_hang_whatever_the_exits_are(tmp_path: Path) -> None:
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    write(tmp_path, 2, "rank-1", *steps(8))
    found = named(tmp_path, exits((0, -9), (1, -9), hang=LOST))
    assert (found.cause, found.rank, found.place, found.what) == ("hung", 1, "optimizer", LOST.text)


def test_numbers_that_went_wrong(tmp_path: Path) -> None:
    """All say so together; their step is the one that is meant, however far the record has come."""
    facts = {"trouble": "spike", "step": 7, "value": 9.0, "usual": 2.0, "spread": 0.5, "window": [48, 56]}
    for rank in (0, 1):
        write(tmp_path, 2, f"rank-{rank}", *steps(8), error("BadNumbers", "the loss jumped", **facts))
    found = named(tmp_path, exits((1, 1), (0, 1)))
    assert (found.cause, found.step, found.reached) == ("spike", 7, 8)
    assert (found.window, found.usual, found.spread) == ((48, 56), 2.0, 0.5)
    assert found.what == "the loss jumped", "nobody's fault"


def test_damage_is_named_with_its_place(tmp_path: Path) -> None:
    write(tmp_path, 2, "rank-0", error("DamagedState", "file x is damaged"))
    write(tmp_path, 2, "rank-1", PEER)
    ended = exits((1, 1), (0, 1))
    assert named(tmp_path, ended, checkpoint="/there/step-00000004").place == "/there/step-00000004"
    assert named(tmp_path, ended, from_memory=True).place == "memory"
    assert named(tmp_path, ended).cause == "damaged"


@pytest.mark.parametrize(
    "ended",
    [
        exits((1, -9), (0, 1), killed_for_memory=True),  # the kernel
        exits((1, 74), (0, 1)),  # a full disk under the record
        exits((0, 0), (1, 0)),  # the last save failed
    ],
    ids=["memory", "record", "save"],
)
def test_what_starting_again_would_not_mend(tmp_path: Path, ended: AttemptEnd) -> None:
    write(tmp_path, 2, "rank-0", *steps(8))
    outcome = explain_exit(RunFolder(tmp_path), 2, ended, 0, StateError("no room", hint="make some"))
    assert outcome.state == "failed"
    assert classify_failure(attempt_in(tmp_path), ended, outcome, -1).cause == "other"


def test_how_far_it_came(tmp_path: Path) -> None:
    """What is recorded or kept in memory, whichever is further: a killed worker's last line may be missing."""
    ended = exits((1, -9), (0, 1))
    assert named(tmp_path, ended, from_step=4).reached == 4, "no record at all"
    write(tmp_path, 2, "rank-0", *steps(8, 5))
    assert (named(tmp_path, ended).reached, named(tmp_path, ended, kept=9).reached) == (8, 9)
    assert named(tmp_path, ended, kept=9).step == 10
    assert last_step(RunFolder(tmp_path), attempt_in(tmp_path)) == 8
    assert last_step(RunFolder(tmp_path), attempt_in(tmp_path).model_copy(update={"number": 7, "from_step": 3})) == 3


def test_the_end_of_a_log_is_not_part_of_what_happened(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "0002-rank-1.log").write_text("a\nb\n")
    ended = exits((1, -11), (0, 1))
    outcome = explain_exit(RunFolder(tmp_path), 2, ended, 0)
    assert outcome.reason == "worker 1 was killed by signal 11 (SIGSEGV); the end of its log: a\nb"
    assert named(tmp_path, ended).what == "worker 1 was killed by signal 11 (SIGSEGV)"


# -- what happened before


def lived(run: Path, number: int, source: str | None, failure: Failure | None) -> None:
    """An attempt's record by its agent."""
    told = {} if failure is None else {"failure": json.loads(json.dumps(as_fields(failure)))}
    start = {"kind": "attempt", "workers": 2, "device": "cpu", "from_step": 0, "source": source}
    write(run, number, "agent", start, {"kind": "end", "outcome": "failed", "reason": "", **told})


DIED = Failure("died", "killed", 9, 8, "SIGKILL", 1, 5.0)
SPIKE = Failure("spike", "jumped", 7, 8, at=6.0, window=(48, 56), usual=2.0, spread=0.5)


def test_what_happened_before_is_read_back(tmp_path: Path) -> None:
    """Of the attempts since somebody started the run, the oldest first, as they were."""
    run = RunFolder(tmp_path)
    lived(tmp_path, 1, None, Failure("hung", "of an earlier start"))
    lived(tmp_path, 2, "memory", Failure("hung", "of an earlier start"))
    lived(tmp_path, 3, None, DIED)
    lived(tmp_path, 4, "start", SPIKE)
    lived(tmp_path, 5, "disk", DIED)
    assert failures_before(run, 6) == (DIED, SPIKE, DIED)
    assert failures_before(run, 5) == (DIED, SPIKE)
    assert failures_before(run, 4) == (DIED,)
    assert [one.what for one in failures_before(run, 3)] == ["of an earlier start"] * 2
    assert failures_before(run, 1) == ()


def test_records_that_are_lost_or_torn_cost_no_more_than_themselves(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    lived(tmp_path, 1, None, DIED)
    lived(tmp_path, 2, "memory", SPIKE)
    lived(tmp_path, 3, "memory", DIED)
    path = tmp_path / "events" / "0003-agent.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + '\n{"kind":"end","outc')
    assert failures_before(run, 4) == (DIED, SPIKE)
    (tmp_path / "events" / "0002-agent.jsonl").unlink()
    assert failures_before(run, 4)[-1:] in ((), (DIED,))


def test_a_stop_hurries_nothing_but_itself(tmp_path: Path) -> None:
    """Two stops are an end that was asked for, whatever the workers died of."""
    write(tmp_path, 2, "rank-0", *steps(8), error())
    ended = exits((0, 1), (1, -9))
    assert explain_exit(RunFolder(tmp_path), 2, ended, 2).state == "stopped"
    assert explain_exit(RunFolder(tmp_path), 2, ended, 1).state == "failed"
    assert [explain_exit(RunFolder(tmp_path), 2, exits((0, code), (1, code)), 1) for code in (75, 0)] == [
        AttemptOutcome("stopped", "stopped on request, state saved", f"headway resume {tmp_path.name}"),
        AttemptOutcome("finished", "all steps done", None),
    ]
    assert read_run(RunFolder(tmp_path), "rank-0")[0].events[-1]["type"] == "WorkerError"
