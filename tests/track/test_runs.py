"""Run folders: names, references, the lock (against real processes) and summaries."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headway.errors import RunError, UsageError
from headway.track import (
    Recorder,
    RunFolder,
    create_run,
    find_run,
    has_stepped,
    list_runs,
    lock_holder,
    lock_run,
    next_attempt,
    parse_ref,
    record_path,
    runs_root,
    set_aside,
    summarize,
    take_back,
)


def test_runs_root_is_option_then_environment_then_default(monkeypatch):
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)
    assert runs_root(None) == Path("runs")
    monkeypatch.setenv("HEADWAY_RUNS", "/elsewhere")
    assert runs_root(None) == Path("/elsewhere")
    assert runs_root(Path("given")) == Path("given")
    monkeypatch.setenv("HEADWAY_RUNS", "")
    assert runs_root() == Path("runs")


def test_new_runs_are_named_after_their_recipe_without_collisions(tmp_path):
    root = tmp_path / "deep" / "runs"
    names = {create_run(root, "demo").name for _ in range(30)}
    assert len(names) == 30
    assert all(name.startswith("demo-") and int(name[-4:], 16) >= 0 and len(name) == 9 for name in names)
    run = create_run(root, "demo", "mine")
    assert all(folder.is_dir() for folder in (run.events, run.checkpoints, run.logs))
    with pytest.raises(RunError, match="already") as caught:
        create_run(root, "demo", "mine")
    assert "resume" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["", "-x", ".x", "a/b", "..", "a b", "a@3", "last", "é", "a\n"])
def test_invalid_run_name_is_refused_and_creates_nothing(tmp_path, name):
    with pytest.raises(RunError, match="invalid run name"):
        create_run(tmp_path, "demo", name)
    assert list(tmp_path.iterdir()) == []


def test_uncreatable_runs_root_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot create the run folder"):
        create_run(tmp_path / "file", "demo")


def touch(run: RunFolder, when: int, process: str = "agent", attempt: int = 1) -> None:
    path = record_path(run.events, attempt, process)
    path.write_text("")
    os.utime(path, (when, when))


def test_run_is_found_by_name_prefix_or_last(tmp_path):
    runs = {name: create_run(tmp_path, "x", name) for name in ("demo", "demo-1f", "demo-2a", "other")}
    for when, name in enumerate(["demo", "other", "demo-2a", "demo-1f"], start=1000):
        touch(runs[name], when)
    touch(runs["other"], 5000, "rank-0")  # still writing: the last, though started long ago
    (tmp_path / "stray.txt").write_text("")
    (tmp_path / "no-run").mkdir()
    assert [run.name for run in list_runs(tmp_path)] == ["other", "demo-1f", "demo-2a", "demo"]
    assert find_run(tmp_path, "demo") == runs["demo"]
    assert find_run(tmp_path, "demo-2") == runs["demo-2a"]
    assert find_run(tmp_path, "o") == runs["other"]
    assert find_run(tmp_path, "last") == runs["other"]


def test_unknown_run_lists_similar_names(tmp_path):
    with pytest.raises(RunError, match="no runs"):
        find_run(tmp_path / "none", "last")
    for name in ("demo-1f", "demo-2a", "other"):
        create_run(tmp_path, "x", name)
    with pytest.raises(RunError, match="no run 'dmo-1f'") as caught:
        find_run(tmp_path, "dmo-1f")
    assert "demo-1f" in (caught.value.hint or "")
    with pytest.raises(RunError, match="demo-1f, demo-2a"):
        find_run(tmp_path, "demo-")
    with pytest.raises(RunError, match="no run ''"):
        find_run(tmp_path, "")


def test_run_references_with_step():
    assert parse_ref("demo") == ("demo", None)
    assert parse_ref("demo-1f@200") == ("demo-1f", 200)
    assert parse_ref("last@0") == ("last", 0)
    for bad in ("demo@", "demo@x", "@3", "demo@-1", "demo@²", "a@1@2"):
        with pytest.raises(UsageError):
            parse_ref(bad)


def test_next_attempt_follows_the_latest(tmp_path):
    run = create_run(tmp_path, "demo")
    assert next_attempt(run) == 1
    touch(run, 1, "agent", 1)
    touch(run, 1, "rank-0", 12)
    (run.events / "notes.jsonl").write_text("")
    (run.events / "x-y.jsonl").write_text("")
    assert next_attempt(run) == 13


@pytest.mark.parametrize(
    ("outcome", "command"),
    [("stopped", "headway resume r"), ("failed", "headway resume r"), ("finished", None), (None, "headway resume r")],
)
def test_taken_name_suggests_resume_only_where_it_works(tmp_path, outcome, command):
    run = create_run(tmp_path, "x", "r")
    with Recorder(record_path(run.events, 1, "agent"), attempt=1, process="agent") as recorder:
        recorder.event("attempt", workers=1, device="cpu")
        if outcome is not None:
            recorder.event("end", outcome=outcome, reason="because")

    def hint() -> str:
        with pytest.raises(RunError, match="run r already exists") as caught:
            create_run(tmp_path, "x", "r")
        assert caught.value.exit_status == 2
        return caught.value.hint or ""

    assert (command in hint()) if command else hint() == "choose another name, such as r-2"
    with lock_run(run):
        assert "headway stop r" in hint()
    if outcome is None:
        (run.path / "jobs.jsonl").write_text("")
        assert hint() == "choose another name, such as r-2", "an engine will start it"


@pytest.mark.parametrize(
    ("taken", "free"),
    [
        (["demo"], "demo-2"),
        (["demo", "demo-2", "demo-3"], "demo-4"),
        (["demo-9"], "demo-10"),
        (["demo-1f2e"], "demo-1f2e-2"),
        (["demo-2026"], "demo-2026-2"),
        (["a" * 64], "a" * 62 + "-2"),
    ],
)
def test_taken_name_suggests_a_free_one_that_is_accepted(tmp_path, taken, free):
    for name in taken:
        create_run(tmp_path, "x", name)
    with pytest.raises(RunError) as refused:
        create_run(tmp_path, "x", taken[0])
    assert f"such as {free}" in (refused.value.hint or "")
    assert create_run(tmp_path, "x", free).name == free


def test_failed_runs_make_room_for_their_name_and_stay_readable(tmp_path):
    """Three runs of one name fail; each is found by its own folder, and the last by the name while that is free."""
    for when in (1000, 3000, 2000):
        run = create_run(tmp_path, "x", "tonight")
        touch(run, when)
        set_aside(run)
    aside = sorted(path.name for path in (tmp_path / ".failed").iterdir())
    assert aside == ["tonight", "tonight~2", "tonight~3"]
    assert list_runs(tmp_path) == []
    assert find_run(tmp_path, ".failed/tonight~3").path == tmp_path / ".failed" / "tonight~3"
    assert find_run(tmp_path, "tonight").name == "tonight~2"
    with pytest.raises(RunError, match="no runs"):
        find_run(tmp_path, "ton")
    create_run(tmp_path, "x", "tonight-again")
    assert find_run(tmp_path, "tonight").name == "tonight~2", "a whole name comes before the beginning of another"
    assert find_run(tmp_path, "toni").name == "tonight-again"
    assert find_run(tmp_path, "last").name == "tonight-again"
    create_run(tmp_path, "x", "tonight")
    assert find_run(tmp_path, "tonight").path == tmp_path / "tonight"
    with pytest.raises(RunError, match="no run 'x'"):
        find_run(tmp_path, ".failed/x")


def test_failed_run_takes_its_name_back_unless_another_has_it(tmp_path):
    first = set_aside(create_run(tmp_path, "x", "tonight"))
    second = set_aside(create_run(tmp_path, "x", "tonight"))
    assert take_back(second) == RunFolder(tmp_path / "tonight")
    with pytest.raises(RunError, match="is another run now"):
        take_back(first)
    assert first.path.exists()


def test_run_has_stepped_once_a_step_is_recorded_or_saved(tmp_path):
    run = create_run(tmp_path, "x", "r")
    assert not has_stepped(run)
    with Recorder(record_path(run.events, 1, "rank-0"), attempt=1, process="rank-0") as recorder:
        recorder.event("resumed", step=40)
        recorder.event("error", message="no memory")
    assert not has_stepped(run), "a fork starts at another run's step"
    (run.checkpoints / "step-00000001").mkdir()
    assert has_stepped(run)
    (run.checkpoints / "step-00000001").rmdir()
    with Recorder(record_path(run.events, 2, "rank-0"), attempt=2, process="rank-0") as recorder:
        recorder.event("step", step=41)
    assert has_stepped(run)


HOLDER = """
import sys, time
from pathlib import Path
from headway.track import RunFolder, lock_run
with lock_run(RunFolder(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_run_lock_is_exclusive_and_released_when_holder_is_killed(tmp_path):
    run = create_run(tmp_path, "demo", "demo")
    assert lock_holder(run) is None
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert lock_holder(run) == process.pid
        assert json.loads(run.lock_file.read_text())["pid"] == process.pid
        with pytest.raises(RunError, match=f"demo is in use by process {process.pid}") as caught, lock_run(run):
            pass
        assert "headway stop demo" in (caught.value.hint or "")
        assert summarize(run).state == "running"
    finally:
        process.kill()
        process.communicate()
    assert lock_holder(run) is None
    with lock_run(run):
        assert lock_holder(run) == os.getpid()
    assert lock_holder(run) is None


def test_lock_holder_query_does_not_block_locking(tmp_path):
    run = create_run(tmp_path, "demo")
    with run.lock_file.open("w") as looking:  # what `holder` does, caught in the act
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert lock_holder(run) is None
        threading.Timer(0.03, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with lock_run(run):
            assert lock_holder(run) == os.getpid()


def test_lock_is_released_when_body_raises(tmp_path):
    run = create_run(tmp_path, "demo")
    with pytest.raises(KeyError), lock_run(run):
        raise KeyError("x")
    assert lock_holder(run) is None


def test_deleted_run_cannot_be_locked(tmp_path):
    with pytest.raises(RunError, match="cannot lock"), lock_run(RunFolder(tmp_path / "gone")):
        pass


class FakeClock:
    """Seconds as told; both clocks of a recorder."""

    def __init__(self) -> None:
        self.s = 0.0

    def mono(self) -> int:
        return round(self.s * 1e9)

    def wall(self) -> float:
        return 1e9 + self.s


def live(run: RunFolder, attempt: int, clock: FakeClock, first: int, last: int, outcome: str | None) -> None:
    """One attempt: steps first..last, a second each."""
    options = {"attempt": attempt, "clock": clock.mono, "wall": clock.wall}
    with (
        Recorder(record_path(run.events, attempt, "agent"), process="agent", **options) as agent,
        Recorder(record_path(run.events, attempt, "rank-0"), process="rank-0", **options) as rank,
    ):
        agent.event("attempt", workers=2, device="cpu", from_step=first - 1, recipe_changes={})
        rank.event("facts", total_steps=9000, tokens_per_step=64)
        rank.event("resumed", step=first - 1)
        for step in range(first, last + 1):
            clock.s += 1
            rank.event("step", step=step, data=0, compute=10**9, loss=10.0 / step, tokens=64)
        if outcome:
            agent.event("end", outcome=outcome, reason=f"it {outcome}")


def test_summary_of_a_run(tmp_path):
    run, clock = create_run(tmp_path, "demo"), FakeClock()
    assert (summarize(run).state, summarize(run).step, summarize(run).attempts) == ("interrupted", 0, 0)
    live(run, 1, clock, 1, 5000, "failed")
    first = summarize(run)
    assert (first.state, first.step, first.total_steps, first.loss) == ("failed", 5000, 9000, 10.0 / 5000)
    assert (first.attempts, first.workers, first.device) == (1, 2, "cpu")
    assert first.reason == "it failed"
    assert first.seconds == 5000
    clock.s += 100  # nobody held the devices in between
    live(run, 2, clock, 4001, 4000, None)
    second = summarize(run)
    assert (second.state, second.step, second.attempts) == ("interrupted", 4000, 2)
    live(run, 3, clock, 4001, 4100, None)
    third = summarize(run)
    assert (third.state, third.step, third.seconds) == ("interrupted", 4100, 5100)
    assert third.started == 1e9
    with lock_run(run):
        assert summarize(run).state == "running"


@pytest.mark.parametrize("outcome", ["finished", "stopped", "failed"])
def test_run_state_is_outcome_of_last_attempt(tmp_path, outcome):
    run = create_run(tmp_path, "demo")
    live(run, 1, FakeClock(), 1, 3, "failed")
    live(run, 2, FakeClock(), 4, 6, outcome)
    assert summarize(run).state == outcome


def test_damaged_record_is_still_summarized(tmp_path):
    run = create_run(tmp_path, "demo")
    record_path(run.events, 1, "agent").write_bytes(b"\0\xff{\n")
    record_path(run.events, 1, "rank-0").write_text('{"kind":"step","t":"x","step":null,"loss":"y"}\n{"kind":"st')
    assert summarize(run).step == 0
    assert summarize(run).loss is None
