"""Classification of failures from hand-written exits, hangs and worker records."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from headway.agent import Attempt, AttemptOutcome
from headway.agent.supervise.failures import (
    classify_failure,
    collateral_ranks,
    failures_before,
    last_step,
)
from headway.agent.supervise.hang_detector import Stall
from headway.agent.supervise.outcome import AttemptEnd, collect_evidence, explain_exit
from headway.agent.supervise.recover import Failure
from headway.agent.supervise.worker_monitor import LostWorker
from headway.agent.workers.workers import WorkerExit
from headway.errors import StateError
from headway.track import RunFolder, read_run

PEER = {"kind": "error", "type": "PeerFailed", "message": "lost the connection to another worker", "hint": None}
LOST = LostWorker(
    Stall(1, 9, "optimizer", 0, 6.0, 2.5, others_wait=True), "worker 1 is hung in step 9, optimizer (sleeping)"
)


def write(run: Path, attempt: int, process: str, *events: dict[str, Any]) -> None:
    """Write the record of a process."""
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


def classified(run: Path, ended: AttemptEnd, snapshot: int = -1, stops: int = 0, **more: Any) -> Failure:
    """Classify an end as the agent does."""
    attempt = attempt_in(run, **more)
    ended.bystanders |= collateral_ranks(attempt)
    outcome = explain_exit(collect_evidence(RunFolder(run), attempt.number, ended, stops))
    return classify_failure(attempt, ended, outcome, snapshot)


def exits(*codes: tuple[int, int], **more: Any) -> AttemptEnd:
    """Ranks and exit codes in the order of the exits."""
    return AttemptEnd([WorkerExit(rank, 100 + rank, code) for rank, code in codes], **more)


# -- causes


def test_killed_worker(tmp_path: Path) -> None:
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    write(tmp_path, 2, "rank-1", *steps(8))
    failure = classified(tmp_path, exits((1, -9), (0, 1)))
    assert replace(failure, at=0) == Failure(
        "died", "worker 1 was killed by signal 9 (SIGKILL)", step=9, reached=8, place="SIGKILL", rank=1
    )
    assert failure.at > 1e9, "wall-clock time"


def test_errors_caused_by_a_death_are_not_the_cause(tmp_path: Path) -> None:
    """Not every error raised after the loss of a peer has a known type."""
    write(tmp_path, 2, "rank-0", *steps(8), error(message="RuntimeError: something broke", place="torch.py:1"))
    write(tmp_path, 2, "rank-1", *steps(8))
    failure = classified(tmp_path, exits((1, -9), (0, 1)))
    assert (failure.cause, failure.what, failure.rank) == ("died", "worker 1 was killed by signal 9 (SIGKILL)", 1)


def test_worker_that_exited_without_an_error(tmp_path: Path) -> None:
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    failure = classified(tmp_path, exits((1, 3), (0, 1)))
    assert (failure.cause, failure.what, failure.place) == ("died", "worker 1 exited with status 3", "status 3")


@pytest.mark.parametrize(("code", "how"), [(-9, "was killed by signal 9 (SIGKILL)"), (3, "exited with status 3")])
def test_collateral_rank_is_not_blamed_even_if_reported_first(tmp_path: Path, code: int, how: str) -> None:
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    write(tmp_path, 2, "rank-1", *steps(8))
    failure = classified(tmp_path, exits((0, 1), (1, code)))
    assert (failure.cause, failure.what, failure.rank) == ("died", f"worker 1 {how}", 1)


def test_rank_ended_by_the_agent_is_not_blamed(tmp_path: Path) -> None:
    """A connection broke by itself: only one worker recorded it."""
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    write(tmp_path, 2, "rank-1", *steps(8))
    failure = classified(tmp_path, exits((0, 1), (1, -9), bystanders={1}))
    assert (failure.cause, failure.what, failure.rank) == ("died", "worker 0 exited with status 1", 0)


@pytest.mark.parametrize("first", [0, 1])
def test_worker_that_raised(tmp_path: Path, first: int) -> None:
    """Whichever exited first: the other only lost its connection."""
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    write(tmp_path, 2, "rank-1", *steps(7), error())
    failure = classified(tmp_path, exits((first, 1), (1 - first, 1)))
    assert (failure.cause, failure.what) == ("raised", "worker 1 failed: ValueError: oh")
    assert (failure.step, failure.reached, failure.place) == (9, 8, "own.py:7")


@pytest.mark.parametrize(
    ("last", "more", "cause"),
    [
        (0, {}, "other"),  # before the first step of a new run
        (1, {}, "raised"),
        (5, {"from_step": 5}, "other"),  # before the first step of a resumed one
        (6, {"from_step": 5}, "raised"),
        (5, {"from_step": 5, "source": "memory"}, "raised"),  # it got further before
    ],
)
def test_error_before_the_first_step_is_not_retried(tmp_path: Path, last: int, more: dict, cause: str) -> None:
    write(tmp_path, 2, "rank-0", *steps(last, more.get("from_step", 0) + 1), error())
    assert classified(tmp_path, exits((0, 1), (1, -9)), **more).cause == cause


@pytest.mark.parametrize("message", ["out of memory", "worse"])
def test_known_errors_are_not_retried(tmp_path: Path, message: str) -> None:
    kind = "WorkerError" if message == "out of memory" else "StateError"
    write(tmp_path, 2, "rank-0", *steps(8), error(kind, message))
    assert classified(tmp_path, exits((0, 1), (1, 1))).cause == "other"


def test_hang_takes_precedence_over_exits(tmp_path: Path) -> None:
    write(tmp_path, 2, "rank-0", *steps(8), PEER)
    write(tmp_path, 2, "rank-1", *steps(8))
    failure = classified(tmp_path, exits((0, -9), (1, -9), hang=LOST))
    assert (failure.cause, failure.rank, failure.place, failure.what) == ("hung", 1, "optimizer", LOST.text)


def test_bad_numbers(tmp_path: Path) -> None:
    """All ranks record it; its step counts, however far the record got."""
    facts = {"trouble": "spike", "step": 7, "value": 9.0, "usual": 2.0, "spread": 0.5, "window": [48, 56]}
    for rank in (0, 1):
        write(tmp_path, 2, f"rank-{rank}", *steps(8), error("BadNumbers", "the loss jumped", **facts))
    failure = classified(tmp_path, exits((1, 1), (0, 1)))
    assert (failure.cause, failure.step, failure.reached) == ("spike", 7, 8)
    assert (failure.window, failure.usual, failure.spread) == ((48, 56), 2.0, 0.5)
    assert failure.what == "the loss jumped", "no rank is blamed"


def test_damage_has_the_address_as_its_place(tmp_path: Path) -> None:
    write(tmp_path, 2, "rank-0", error("DamagedState", "file x is damaged"))
    write(tmp_path, 2, "rank-1", PEER)
    ended = exits((1, 1), (0, 1))
    assert classified(tmp_path, ended, checkpoint="/there/step-00000004").place == "/there/step-00000004"
    assert classified(tmp_path, ended, from_memory=True).place == "memory"
    assert classified(tmp_path, ended).cause == "damaged"


@pytest.mark.parametrize(
    "ended",
    [
        exits((1, -9), (0, 1), killed_for_memory=True),  # the kernel
        exits((1, 74), (0, 1)),  # a full disk under the record
        exits((0, 0), (1, 0)),  # the last save failed
    ],
    ids=["memory", "record", "save"],
)
def test_failures_that_a_restart_would_not_fix(tmp_path: Path, ended: AttemptEnd) -> None:
    write(tmp_path, 2, "rank-0", *steps(8))
    outcome = explain_exit(collect_evidence(RunFolder(tmp_path), 2, ended, 0, StateError("no room", hint="make some")))
    assert outcome.state == "failed"
    assert classify_failure(attempt_in(tmp_path), ended, outcome, -1).cause == "other"


@pytest.mark.parametrize(
    ("unsaved", "uploaded", "outage", "status", "words"),
    [
        (True, False, None, 1, "the last state could not be saved: no room"),
        (True, True, None, 75, "the last state is in the object store; on disk: no room"),
        (True, True, "no records for 600 s", 75, "no records for 600 s: the last state is in the object store"),
        (True, False, "no records for 600 s", 75, "no records for 600 s: the last state could not be saved"),
        (False, False, "no records for 600 s", 75, "no records for 600 s: state saved"),
        (False, False, None, 75, "stopped on request, state saved"),
    ],
)
def test_run_whose_storage_failed_can_be_resumed(
    tmp_path: Path, unsaved: bool, uploaded: bool, outage: str | None, status: int, words: str
) -> None:
    error = StateError("no room", hint="make some") if unsaved else None
    evidence = collect_evidence(RunFolder(tmp_path), 2, exits((0, 75), (1, 75)), 1, error)
    outcome = explain_exit(replace(evidence, uploaded=uploaded, outage=outage))
    assert outcome.exit_status == status
    assert words in outcome.reason
    assert outcome.hint


def test_step_reached(tmp_path: Path) -> None:
    """Recorded or held in memory, whichever is later: a killed worker's last line may be missing."""
    ended = exits((1, -9), (0, 1))
    assert classified(tmp_path, ended, from_step=4).reached == 4, "no record at all"
    write(tmp_path, 2, "rank-0", *steps(8, 5))
    assert (classified(tmp_path, ended).reached, classified(tmp_path, ended, snapshot=9).reached) == (8, 9)
    assert classified(tmp_path, ended, snapshot=9).step == 10
    assert last_step(RunFolder(tmp_path), attempt_in(tmp_path)) == 8
    assert last_step(RunFolder(tmp_path), attempt_in(tmp_path).model_copy(update={"number": 7, "from_step": 3})) == 3


def test_log_tail_is_not_part_of_the_failure(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "0002-rank-1.log").write_text("a\nb\n")
    ended = exits((1, -11), (0, 1))
    outcome = explain_exit(collect_evidence(RunFolder(tmp_path), 2, ended, 0))
    assert outcome.reason == "worker 1 was killed by signal 11 (SIGSEGV); the end of its log: a\nb"
    assert classified(tmp_path, ended).what == "worker 1 was killed by signal 11 (SIGSEGV)"


# -- earlier failures


def record_attempt(run: Path, number: int, source: str | None, failure: Failure | None) -> None:
    """Write an attempt's record by its agent."""
    fields = {} if failure is None else {"failure": json.loads(json.dumps(asdict(failure)))}
    start = {"kind": "attempt", "workers": 2, "device": "cpu", "from_step": 0, "source": source}
    write(run, number, "agent", start, {"kind": "end", "outcome": "failed", "reason": "", **fields})


DIED = Failure("died", "killed", 9, 8, "SIGKILL", 1, 5.0)
SPIKE = Failure("spike", "jumped", 7, 8, at=6.0, window=(48, 56), usual=2.0, spread=0.5)


def test_earlier_failures_are_read_back(tmp_path: Path) -> None:
    """Of the attempts since the run was started by a user, oldest first."""
    run = RunFolder(tmp_path)
    record_attempt(tmp_path, 1, None, Failure("hung", "of an earlier start"))
    record_attempt(tmp_path, 2, "memory", Failure("hung", "of an earlier start"))
    record_attempt(tmp_path, 3, None, DIED)
    record_attempt(tmp_path, 4, "start", SPIKE)
    record_attempt(tmp_path, 5, "disk", DIED)
    assert failures_before(run, 6) == (DIED, SPIKE, DIED)
    assert failures_before(run, 5) == (DIED, SPIKE)
    assert failures_before(run, 4) == (DIED,)
    assert [failure.what for failure in failures_before(run, 3)] == ["of an earlier start"] * 2
    assert failures_before(run, 1) == ()


def test_lost_or_torn_record_hides_only_itself(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record_attempt(tmp_path, 1, None, DIED)
    record_attempt(tmp_path, 2, "memory", SPIKE)
    record_attempt(tmp_path, 3, "memory", DIED)
    path = tmp_path / "events" / "0003-agent.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + '\n{"kind":"end","outc')
    assert failures_before(run, 4) == (DIED, SPIKE)
    (tmp_path / "events" / "0002-agent.jsonl").unlink()
    assert failures_before(run, 4)[-1:] in ((), (DIED,))


def test_second_stop_is_reported_as_stopped(tmp_path: Path) -> None:
    """Two stop requests count as stopped, whatever the workers died of."""
    write(tmp_path, 2, "rank-0", *steps(8), error())
    ended = exits((0, 1), (1, -9))
    assert explain_exit(collect_evidence(RunFolder(tmp_path), 2, ended, 2)).state == "stopped"
    assert explain_exit(collect_evidence(RunFolder(tmp_path), 2, ended, 1)).state == "failed"
    assert [
        explain_exit(collect_evidence(RunFolder(tmp_path), 2, exits((0, code), (1, code)), 1)) for code in (75, 0)
    ] == [
        AttemptOutcome("stopped", "stopped on request, state saved", RunFolder(tmp_path).command("resume")),
        AttemptOutcome("finished", "all steps done", None),
    ]
    assert read_run(RunFolder(tmp_path), "rank-0")[0].events[-1]["type"] == "WorkerError"
