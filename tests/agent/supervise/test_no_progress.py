"""A run that is stopped before it makes a step in three starts of its job in a row is not restarted."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from headway.agent import AttemptOutcome, new_run, resume_run, supervise_run
from headway.agent.supervise.no_progress import PastAttempt, judge_progress, past_attempts
from headway.track import Recorder, RunFolder, record_path, summarize

STOPPED = AttemptOutcome("stopped", "stopped on request before the first step", "headway resume r")
NOW = PastAttempt("", stepped=False, seconds=43.2)
IDLE, WORKED = PastAttempt("stopped", stepped=False), PastAttempt("stopped", stepped=True)
FAILED, RECOVERED = PastAttempt("failed", stepped=False), PastAttempt("recovered", stepped=False)
DIED = PastAttempt("", stepped=False)


@pytest.mark.parametrize(
    ("attempts", "state"),
    [
        ([NOW, IDLE, IDLE], "failed"),
        ([NOW, IDLE, IDLE, WORKED], "failed"),
        ([NOW, RECOVERED, IDLE, DIED, IDLE], "failed"),  # an agent that tries again is not a start
        ([NOW], "stopped"),
        ([NOW, IDLE], "stopped"),
        ([NOW, IDLE, WORKED, IDLE], "stopped"),
        ([replace(NOW, stepped=True), IDLE, IDLE], "stopped"),
        ([NOW, IDLE, FAILED, IDLE, IDLE], "stopped"),  # somebody has restarted it since
        ([NOW, DIED, DIED, DIED], "stopped"),  # lost machines, not stops
    ],
)
def test_third_start_without_a_step_fails(attempts: list[PastAttempt], state: str) -> None:
    outcome = judge_progress(STOPPED, attempts, RunFolder(Path("runs") / "r"))
    assert outcome.state == state
    if state == "failed":
        assert outcome.reason == (
            "no step in 3 starts in a row; the last, after 43 s: stopped on request before the first step"
        )
        assert "raise limit_s" in str(outcome.hint)
        assert "headway requeue r" in str(outcome.hint)


def test_attempts_are_read_from_their_records(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.events.mkdir()
    ends = [{"outcome": "failed", "recovery": "restart"}, {"outcome": "stopped"}, {"outcome": "failed"}, None]
    for number, end in enumerate(ends, start=1):
        with Recorder(record_path(run.events, number, "agent"), attempt=number, process="agent") as recorder:
            recorder.event("end", **end) if end else None
        if number != 2:
            with Recorder(record_path(run.events, number, "rank-0"), attempt=number, process="rank-0") as recorder:
                recorder.event("step", step=number) if number == 3 else recorder.event("facts")
    attempts = list(past_attempts(run, 4))
    assert [(attempt.end, attempt.stepped) for attempt in attempts] == [
        ("", False),
        ("failed", True),
        ("stopped", False),
        ("recovered", False),
    ]


@pytest.mark.slow
def test_requeued_run_without_a_step_ends_as_failed(
    tmp_path: Path, recipe, zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine starts it: a signal during each start-up, until the exit status asks for no further start."""
    attempt, statuses = new_run(recipe({"train.steps": 2}), tmp_path, workers=1), list[int]()
    for start in range(1, 4):
        attempt = attempt.model_copy(update={"engine_start": start})
        signals = iter([signal.SIGUSR1])
        with monkeypatch.context() as patch:
            patch.setattr(zygote, "ready", lambda _timeout_s: False)  # still importing torch
            outcome = supervise_run(
                attempt, lambda _, left=signals: [os.kill(os.getpid(), number) for number in left], warm=zygote
            )
        statuses.append(outcome.exit_status)
        attempt = resume_run(attempt.folder, [])
    assert statuses == [75, 75, 1]
    assert "no step in 3 starts in a row" in outcome.reason
    summary = summarize(attempt.folder)
    assert (summary.state, summary.reason, summary.step) == ("failed", outcome.reason, 0)
    assert supervise_run(attempt, warm=zygote).state == "finished"
