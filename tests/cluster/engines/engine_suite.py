"""The behaviour that every engine must have: one set of tests, run against real engines.

The tests of an engine define a fixture `harness` (scope module) that returns an EngineHarness, and then

    from engine_suite import *

runs all of these on it. Jobs are small shell programs; the files that they leave show what they did.
"""

import hashlib
import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest

from eventually import eventually
from headway.cluster.engines import OVER, Engine, JobStatus, LaunchRequest
from headway.errors import EngineError, UsageError

SECRET = "a-value-that-is-written-nowhere"
AWKWARD = [
    "two words",
    "",
    "it's",
    'say "no"',
    "$HOME",
    "$(id)",
    "`id`",
    "a\nb",
    "\\",
    "*",
    "~",
    "-n",
    ";",
    "ümläut",
    "%j",
]


@dataclass
class EngineHarness:
    """A started engine, and what tests must know of it."""

    make: Callable[[], Engine]
    """Opens the engine, as another process would."""
    folder: Path
    """Shared by all machines at this path; tests put everything there."""
    machines: int
    cpus: int
    """Per machine."""
    gpus: int
    """Per machine."""
    limit_s: float = 20.0
    """Time limit of a job that reaches it: long enough for its second start to end before it, even on a busy
    machine."""
    limit_grace_s: float = 2.0
    """Grace period with which such a job is signalled soon."""
    lose: Callable[[str], Callable[[], None]] | None = None
    """Makes a machine vanish, and returns a function that brings it back; None if there is only one."""
    essential: tuple[str, ...] = ()
    """Machines that the engine itself needs."""
    trace: Callable[[str], str] = lambda _: ""
    """What the engine's own logs tell about a job, for the message of a failed test."""
    numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.engine = self.make()

    def request(self, script: str, *arguments: str, **options: object) -> LaunchRequest:
        """A job that runs a bash script in its own folder."""
        folder = self.folder / f"test-{next(self.numbers)}"
        folder.mkdir(parents=True)
        command = ("bash", "-c", script, "bash", *arguments)
        return replace(LaunchRequest("test", command, folder, grace_s=5), **options)  # type: ignore[arg-type]

    def until(self, job: str, *states: str) -> JobStatus:
        """Wait for a job to be in one of these states, and return its status."""

        def reached() -> JobStatus | None:
            status = self.engine.status([job])[job]
            if status.state in states:
                return status
            self.follow_advice(job, status)
            assert status.state not in OVER, (status, self.output(job))
            return None

        return eventually(reached, lambda: (self.engine.status([job]), self.output(job)), poll_s=0.05)

    def follow_advice(self, job: str, status: JobStatus) -> None:
        """Give the command that `headway jobs` suggests, so that no test waits for as long as Slurm holds jobs."""
        if status.remedy == "requeue":
            self.engine.release(job)
        elif status.remedy == "cancel":
            self.engine.cancel(job)

    def over(self, job: str) -> JobStatus:
        """Wait for the end of a job, and return its status."""
        return self.until(job, *OVER)

    def output(self, job: str) -> list[str]:
        """The output of its processes, by start and machine."""
        return [path.read_text() for path in self.engine.logs(job) if path.exists()]


def appears(path: Path) -> str:
    """Wait for a file, and return its content."""
    eventually(lambda: path.exists() and path.read_text().endswith("\n"), lambda: f"{path} has not appeared")
    return path.read_text()


def everything_in(folder: Path) -> dict[Path, bytes]:
    """All files below a folder, at a moment when no job of another test moves any of them."""

    def read() -> dict[Path, bytes] | None:
        try:
            return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        except FileNotFoundError:
            return None

    return eventually(read, lambda: f"files of {folder} come and go", poll_s=0.05)


@pytest.fixture(scope="module")
def job_at_limit(harness: EngineHarness) -> tuple[str, Path]:
    """A job that reaches its time limit: started before the first test, since some engines check only twice a
    minute."""
    script = 'n=$(wc -l <attempts 2>/dev/null); echo >>attempts; [ "${n:-0}" -ge 1 ] && exit; trap "exit 75" USR1; '
    request = harness.request(script + "while :; do sleep 0.1; done")
    request = replace(request, limit_s=harness.limit_s, grace_s=harness.limit_grace_s)
    return harness.engine.launch(request), request.folder


@pytest.fixture(scope="module")
def job_losing_machine(harness: EngineHarness) -> Iterator[tuple[str, str]]:
    """A job on two machines that has just lost one, the second if possible, and that machine's name."""
    if harness.lose is None:
        yield "", ""
        return
    request = harness.request(
        'echo >>"attempts-$HEADWAY_MACHINE"; [ ! -e come-back ] || exit 0; sleep 1000', machines=2
    )
    job = harness.engine.launch(request)
    appears(request.folder / "attempts-1")
    appears(request.folder / "attempts-0")
    name = [machine for machine in harness.until(job, "running").machines if machine not in harness.essential][-1]
    (request.folder / "come-back").touch()
    bring_back = harness.lose(name)
    yield job, name
    bring_back()


def test_job_runs_its_command(harness: EngineHarness, job_at_limit: object) -> None:
    request = harness.request("echo out; echo err >&2; pwd; echo done >mark")
    job = harness.engine.launch(request)
    status = harness.over(job)
    assert (status.state, status.exit_status, status.starts) == ("finished", 0, 1)
    assert len(status.machines) == 1
    assert harness.output(job) == [f"out\nerr\n{request.folder}\n"]
    assert all(request.folder in path.parents for path in harness.engine.logs(job))
    assert (request.folder / "mark").read_text() == "done\n"


@pytest.mark.parametrize(("script", "exit_status"), [("exit 3", 3), ("no-such-program", 127), ("kill -9 $$", 137)])
def test_failing_command_fails_the_job(harness: EngineHarness, script: str, exit_status: int) -> None:
    job = harness.engine.launch(harness.request(script))
    status = harness.over(job)
    assert (status.state, status.exit_status, status.starts) == ("failed", exit_status, 1)
    assert str(exit_status) in status.reason


def test_arguments_are_passed_unchanged(harness: EngineHarness) -> None:
    program = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['AWKWARD'], os.getcwd()]))"
    folder = harness.folder / 'a folder\'s "name" $(x)'
    folder.mkdir()
    command = (sys.executable, "-c", program, *AWKWARD)
    request = LaunchRequest("arguments", command, folder, environment={"AWKWARD": "".join(AWKWARD)})
    job = harness.engine.launch(request)
    assert harness.over(job).state == "finished", harness.output(job)
    assert json.loads(harness.output(job)[0]) == [AWKWARD, "".join(AWKWARD), str(folder)]


def test_setup_lines_run_before_the_command(harness: EngineHarness) -> None:
    job = harness.engine.launch(harness.request('echo "$FROM_SETUP"', setup=("FROM_SETUP=here", "export FROM_SETUP")))
    broken = harness.engine.launch(harness.request("touch ran", setup=("false",)))
    assert harness.over(job).state == "finished"
    assert harness.output(job) == ["here\n"]
    assert harness.over(broken).state == "failed"


def test_variables_are_set_and_secrets_never_written(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", SECRET)
    script = 'printf %s "$A_SECRET" | md5sum | cut -c1-32; echo "$PLAIN"'
    request = harness.request(script, environment={"PLAIN": "to see"}, secrets=("A_SECRET",))
    job = harness.engine.launch(request)
    assert harness.over(job).state == "finished"
    assert harness.output(job) == [f"{hashlib.md5(SECRET.encode()).hexdigest()}\nto see\n"]
    assert SECRET not in harness.engine.describe(request)
    files = everything_in(harness.folder)
    assert files
    assert not [path for path, content in files.items() if SECRET.encode() in content]


def test_missing_secret_is_refused(harness: EngineHarness) -> None:
    request = harness.request("true", secrets=("NO_SUCH_VARIABLE",))
    with pytest.raises(UsageError, match="NO_SUCH_VARIABLE"):
        harness.engine.launch(request)
    assert not list(request.folder.iterdir())


def test_exit_status_75_restarts_the_job(harness: EngineHarness) -> None:
    request = harness.request('echo "start $HEADWAY_START"; echo >>attempts; [ "$(wc -l <attempts)" = 2 ] || exit 75')
    job = harness.engine.launch(request)
    status = harness.over(job)
    assert (status.state, status.exit_status, status.starts) == ("finished", 0, 2)
    assert harness.output(job) == ["start 1\n", "start 2\n"]


def test_sigusr1_makes_a_job_save_and_restart(harness: EngineHarness) -> None:
    script = '[ -e saved ] && exit 0; trap "echo >saved; exit 75" USR1; echo >up; while :; do sleep 0.1; done'
    request = harness.request(script)
    job = harness.engine.launch(request)
    appears(request.folder / "up")
    assert harness.until(job, "running").machines
    harness.engine.signal(job, signal.SIGUSR1)
    status = harness.over(job)
    assert (status.state, status.starts) == ("finished", 2)


def test_job_killed_by_an_early_sigusr1_is_restarted(harness: EngineHarness) -> None:
    request = harness.request("[ -e up ] && exit 0; echo >up; exec sleep 1000")
    job = harness.engine.launch(request)
    appears(request.folder / "up")
    harness.until(job, "running")
    harness.engine.signal(job, signal.SIGUSR1)
    status = harness.over(job)
    assert (status.state, status.starts) == ("finished", 2)


def test_cancel_of_a_running_job(harness: EngineHarness) -> None:
    request = harness.request('trap "echo >signalled; exit 75" USR1; echo >up; while :; do sleep 0.1; done')
    job = harness.engine.launch(request)
    appears(request.folder / "up")
    harness.until(job, "running")
    harness.engine.cancel(job)
    harness.engine.cancel(job)
    status = harness.over(job)
    assert (status.state, status.starts) == ("cancelled", 1)
    assert (request.folder / "signalled").exists()


def test_files_of_a_job_are_as_private_as_its_folder(harness: EngineHarness) -> None:
    request = harness.request("mkdir made; echo >made/file; echo >mark; exec sleep 1000")
    request.folder.chmod(0o700)
    job = harness.engine.launch(request)
    appears(request.folder / "mark")
    harness.engine.cancel(job)
    harness.over(job)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in request.folder.rglob("*")}
    assert request.folder / "made/file" in modes
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def test_cancel_kills_a_job_that_ignores_signals(harness: EngineHarness) -> None:
    request = harness.request('trap "" USR1 TERM; echo $$ >up; while :; do sleep 0.1; done', grace_s=1)
    job = harness.engine.launch(request)
    pid = int(appears(request.folder / "up"))
    harness.engine.cancel(job)
    assert harness.over(job).state == "cancelled"
    eventually(lambda: not Path(f"/proc/{pid}").exists(), lambda: f"process {pid} outlives its job")


def test_cancel_of_a_waiting_job(harness: EngineHarness) -> None:
    everything = {"machines": harness.machines, "cpus": harness.cpus}
    script = 'trap "exit 0" USR1; echo >"up-$HEADWAY_MACHINE"; while :; do sleep 0.1; done'
    first, second = (harness.request(script, **everything) for _ in range(2))
    holder = harness.engine.launch(first)
    for machine in range(harness.machines):  # a signal before the trap is set would kill it
        appears(first.folder / f"up-{machine}")
    waiter = harness.engine.launch(second)
    assert harness.until(waiter, "waiting").starts == 0
    with pytest.raises(EngineError, match="waiting"):
        harness.engine.signal(waiter, signal.SIGUSR1)
    harness.engine.cancel(waiter)
    assert harness.over(waiter).state == "cancelled"
    harness.engine.cancel(holder)
    assert harness.over(holder).state == "finished"
    assert not list(second.folder.glob("up-*"))


def test_finished_job_cannot_be_cancelled_or_signalled(harness: EngineHarness) -> None:
    job = harness.engine.launch(harness.request("true"))
    before = harness.over(job)
    harness.engine.cancel(job)
    assert harness.engine.status([job])[job] == before
    with pytest.raises(EngineError, match="finished"):
        harness.engine.signal(job, signal.SIGUSR1)


def test_impossible_request_is_refused(harness: EngineHarness) -> None:
    for options in ({"machines": harness.machines + 1}, {"gpus": harness.gpus + 1}, {"cpus": harness.cpus + 1000}):
        request = harness.request("touch ran", **options)
        with pytest.raises(UsageError, match=r"\w+ \w+"):
            harness.engine.launch(request)
        assert not [path for path in request.folder.rglob("*") if path.is_file()]


def test_unknown_site_setting_is_refused(harness: EngineHarness) -> None:
    request = harness.request("true", site={"no_such_setting": "1"})
    for act in (harness.engine.describe, harness.engine.launch):
        with pytest.raises(UsageError, match="no_such_setting"):
            act(request)


def test_array_runs_one_task_per_index(harness: EngineHarness) -> None:
    script = 'echo "$HEADWAY_ARRAY_INDEX"; [ "$HEADWAY_ARRAY_INDEX" != 2 ] || exit 5'
    request = harness.request(script, array=4)
    job = harness.engine.launch(request)
    status = harness.over(job)
    assert (status.state, status.starts, status.exit_status) == ("failed", 4, 5)
    tasks = harness.engine.status([f"{job}_{index}" for index in range(4)])
    assert [status.state for status in tasks.values()] == ["finished", "finished", "failed", "finished"]
    assert harness.output(job) == ["0\n", "1\n", "2\n", "3\n"]
    assert harness.output(f"{job}_3") == ["3\n"]


def test_array_respects_its_limit_of_tasks_at_a_time(harness: EngineHarness) -> None:
    """Each prints how many run, including itself."""
    script = 'touch "at-$HEADWAY_ARRAY_INDEX"; sleep 0.5; set -- at-*; echo $#; rm "at-$HEADWAY_ARRAY_INDEX"'
    request = harness.request(script, array=5, at_once=2)
    job = harness.engine.launch(request)
    later = harness.engine.launch(harness.request("true"))
    assert harness.over(later).state == "finished"
    assert harness.over(job).state == "finished"
    assert {int(seen) for seen in harness.output(job)} <= {1, 2}


def test_waiting_array_tasks_can_be_cancelled(harness: EngineHarness) -> None:
    job = harness.engine.launch(harness.request("sleep 600", array=3, at_once=1, grace_s=0))
    harness.until(f"{job}_0", "running")
    harness.engine.cancel(f"{job}_1")
    assert harness.over(f"{job}_1").state == "cancelled"
    assert harness.engine.status([f"{job}_2"])[f"{job}_2"].state == "waiting"
    harness.engine.cancel(f"{job}_0")
    harness.until(f"{job}_2", "running")
    harness.engine.cancel(job)
    assert harness.over(job).state == "cancelled"


def test_one_command_runs_per_machine(harness: EngineHarness) -> None:
    number = min(2, harness.machines)
    request = harness.request('echo "$HEADWAY_MACHINE of $HEADWAY_MACHINES"', machines=number)
    job = harness.engine.launch(request)
    status = harness.over(job)
    assert (status.state, len(set(status.machines))) == ("finished", number)
    names = ",".join(status.machines)
    assert harness.output(job) == [f"{index} of {names}\n" for index in range(number)]
    assert {machine.name for machine in harness.engine.inventory()} >= set(status.machines)


def test_reported_exit_status_of_the_whole_job_counts(harness: EngineHarness) -> None:
    """Whatever became of the others: first a request to restart, then success."""
    if harness.machines == 1:
        return  # there are no others
    report = 'end=75; [ ! -e saved ] || end=0; echo >saved; echo $end >"$HEADWAY_END"; exit $end'
    request = harness.request(f'[ "$HEADWAY_MACHINE" = 0 ] || exit 9; {report}', machines=2)
    job = harness.engine.launch(request)
    status = harness.over(job)
    evidence = (status, harness.trace(job), everything_in(request.folder))
    assert (status.state, status.exit_status, status.starts) == ("finished", 0, 2), evidence


def test_avoided_machines_are_not_used(harness: EngineHarness) -> None:
    names = [machine.name for machine in harness.engine.inventory()]
    if len(names) == 1:
        with pytest.raises(UsageError, match=names[0]):
            harness.engine.launch(harness.request("true", avoid=tuple(names)))
        return
    job = harness.engine.launch(harness.request("true", avoid=tuple(names[:-1])))
    assert harness.over(job).machines == (names[-1],)


def test_next_start_avoids_suspect_machines(harness: EngineHarness) -> None:
    if harness.machines == 1:
        return  # there is no other
    script = 'echo "$HEADWAY_MACHINES" >>been; [ "$(wc -l <been)" = 1 ] || exit 0; '
    script += 'printf "%s\\n" 75 "$HEADWAY_MACHINES" >"$HEADWAY_END"; exit 75'
    request = harness.request(script)
    job = harness.engine.launch(request)
    assert harness.over(job).state == "finished"
    first, second = (request.folder / "been").read_text().split()
    assert first != second


def test_gpus_in_use_are_not_free(harness: EngineHarness) -> None:
    before = harness.engine.inventory()
    assert [machine.gpus for machine in before] == [harness.gpus] * harness.machines
    request = harness.request('echo "$CUDA_VISIBLE_DEVICES" >gpus; until [ -e end ]; do sleep 0.05; done', gpus=2)
    job = harness.engine.launch(request)
    assert len(appears(request.folder / "gpus").split(",")) == 2
    used = harness.engine.inventory()
    machine = {machine.name: machine for machine in used}[harness.until(job, "running").machines[0]]
    assert (machine.state, sum(m.gpus_free for m in used)) == ("busy", sum(m.gpus_free for m in before) - 2)
    (request.folder / "end").touch()
    assert harness.over(job).state == "finished"


def test_unknown_job_has_unknown_state(harness: EngineHarness) -> None:
    job = harness.engine.launch(harness.request("true"))
    harness.over(job)
    statuses = harness.engine.status([job, "99999999", "../../etc"])
    assert [status.state for status in statuses.values()] == ["finished", "unknown", "unknown"]
    assert harness.engine.logs("99999999") == []
    harness.engine.cancel("99999999")
    assert harness.engine.status([]) == {}


def test_another_process_sees_the_same_job(harness: EngineHarness) -> None:
    request = harness.request("echo >up; until [ -e end ]; do sleep 0.05; done; echo bye")
    job = harness.engine.launch(request)
    appears(request.folder / "up")
    harness.engine = harness.make()
    assert harness.until(job, "running").starts == 1
    (request.folder / "end").touch()
    assert harness.over(job).state == "finished"
    assert harness.output(job) == ["bye\n"]


def test_describe_submits_nothing(harness: EngineHarness) -> None:
    request = harness.request("echo 'to be seen'", setup=("export SETUP=1",))
    text = harness.engine.describe(request)
    assert "to be seen" in text
    assert "export SETUP=1" in text
    assert not list(request.folder.iterdir())


@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_many_short_jobs_all_run(harness: EngineHarness, job_losing_machine: object, number: int) -> None:
    request = harness.request("")
    jobs = [harness.engine.launch(replace(request, command=("touch", f"ran-{index}"))) for index in range(number)]
    assert len(set(jobs)) == number

    def over() -> dict[str, JobStatus] | None:
        statuses = harness.engine.status(jobs)
        return statuses if all(status.state in OVER for status in statuses.values()) else None

    statuses = eventually(over, lambda: harness.engine.status(jobs), poll_s=0.1)
    assert {(status.state, status.starts) for status in statuses.values()} == {("finished", 1)}
    assert sum(name.startswith("ran-") for name in os.listdir(request.folder)) == number  # noqa: PTH208


def test_lost_machine_is_replaced(harness: EngineHarness, job_losing_machine: tuple[str, str]) -> None:
    job, lost = job_losing_machine
    if not job:
        return  # there is only this machine
    status = harness.over(job)
    assert (status.state, status.starts, len(status.machines)) == ("finished", 2, 2)
    assert lost not in status.machines


def test_job_saves_at_its_time_limit_and_is_restarted(harness: EngineHarness, job_at_limit: tuple[str, Path]) -> None:
    job, folder = job_at_limit
    status = harness.over(job)
    assert (status.state, status.starts) == ("finished", 2)
    assert len((folder / "attempts").read_text().splitlines()) == 2
