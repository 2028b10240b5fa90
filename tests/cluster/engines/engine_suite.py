"""What every engine must do: one set of tests, against the real thing.

A file of an engine's own tests has a fixture `rig` (scope module) that gives a Rig with a started engine, and then

    from engine_suite import *

runs all of this on it. Jobs are small shell programs; what they did is read from files that they leave.
"""

import hashlib
import json
import os
import signal
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
class Rig:
    """A started engine, and what a test must know of it."""

    make: Callable[[], Engine]
    """The engine, as a verb in another process would open it."""
    folder: Path
    """Every machine sees it at this path; tests put everything there."""
    machines: int
    cpus: int
    """Of each machine."""
    gpus: int
    """Of each machine."""
    limit_s: float = 20.0
    """Of a job that runs into its limit: so long that its second start ends well before it, on a busy machine too."""
    limit_grace_s: float = 2.0
    """The grace with which such a job hears of it soon."""
    lose: Callable[[str], Callable[[], None]] | None = None
    """Has a machine be gone at once, and gives something that brings it back; None where there is only one."""
    essential: tuple[str, ...] = ()
    """Machines with which the engine itself would be lost."""
    numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.engine = self.make()

    def request(self, script: str, *words: str, **options: object) -> LaunchRequest:
        """A job that has bash run a script, in a folder of its own."""
        folder = self.folder / f"test-{next(self.numbers)}"
        folder.mkdir(parents=True)
        command = ("bash", "-c", script, "bash", *words)
        return replace(LaunchRequest("test", command, folder, grace_s=5), **options)  # type: ignore[arg-type]

    def until(self, job: str, *states: str) -> JobStatus:
        """How a job stands once it is in one of these states."""

        def reached() -> JobStatus | None:
            status = self.engine.status([job])[job]
            if status.state in states:
                return status
            assert status.state not in OVER, (status, self.said(job))
            return None

        return eventually(reached, lambda: (self.engine.status([job]), self.said(job)), poll_s=0.05)

    def over(self, job: str) -> JobStatus:
        """How a job ended."""
        return self.until(job, *OVER)

    def said(self, job: str) -> list[str]:
        """What its processes printed."""
        return [path.read_text() for path in self.engine.logs(job) if path.exists()]


def appears(path: Path) -> str:
    """What a file says once it is there."""
    eventually(lambda: path.exists() and path.read_text().endswith("\n"), lambda: f"{path} has not appeared")
    return path.read_text()


def everything_in(folder: Path) -> dict[Path, bytes]:
    """All that is written below a folder, at a moment when no job of another test moves any of it."""

    def read() -> dict[Path, bytes] | None:
        try:
            return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        except FileNotFoundError:
            return None

    return eventually(read, lambda: f"files of {folder} come and go", poll_s=0.05)


@pytest.fixture(scope="module")
def chained(rig: Rig) -> tuple[str, Path]:
    """A job that runs into its limit: begun before the first test, since some engines look every half minute only."""
    script = 'n=$(wc -l <lives 2>/dev/null); echo >>lives; [ "${n:-0}" -ge 1 ] && exit; trap "exit 75" USR1; '
    request = rig.request(script + "while :; do sleep 0.1; done")
    request = replace(request, limit_s=rig.limit_s, grace_s=rig.limit_grace_s)
    return rig.engine.launch(request), request.folder


@pytest.fixture(scope="module")
def bereft(rig: Rig) -> Iterator[tuple[str, str]]:
    """A job on two machines that has just lost one, the second if it may, and that machine's name."""
    if rig.lose is None:
        yield "", ""
        return
    request = rig.request('echo >>"lives-$HEADWAY_MACHINE"; [ ! -e come-back ] || exit 0; sleep 1000', machines=2)
    job = rig.engine.launch(request)
    appears(request.folder / "lives-1")
    appears(request.folder / "lives-0")
    name = [one for one in rig.until(job, "running").machines if one not in rig.essential][-1]
    (request.folder / "come-back").touch()
    bring_back = rig.lose(name)
    yield job, name
    bring_back()


def test_a_job_does_its_work(rig: Rig, chained: object) -> None:
    request = rig.request("echo out; echo err >&2; pwd; echo done >mark")
    job = rig.engine.launch(request)
    status = rig.over(job)
    assert (status.state, status.exit_status, status.starts) == ("finished", 0, 1)
    assert len(status.machines) == 1
    assert rig.said(job) == [f"out\nerr\n{request.folder}\n"]
    assert all(request.folder in path.parents for path in rig.engine.logs(job))
    assert (request.folder / "mark").read_text() == "done\n"


@pytest.mark.parametrize(("script", "exit_status"), [("exit 3", 3), ("no-such-program", 127), ("kill -9 $$", 137)])
def test_a_job_fails(rig: Rig, script: str, exit_status: int) -> None:
    job = rig.engine.launch(rig.request(script))
    status = rig.over(job)
    assert (status.state, status.exit_status, status.starts) == ("failed", exit_status, 1)
    assert str(exit_status) in status.reason


def test_words_arrive_as_they_are(rig: Rig) -> None:
    program = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['AWKWARD'], os.getcwd()]))"
    folder = rig.folder / 'a folder\'s "name" $(x)'
    folder.mkdir()
    words = (sys.executable, "-c", program, *AWKWARD)
    request = LaunchRequest("words", words, folder, environment={"AWKWARD": "".join(AWKWARD)})
    job = rig.engine.launch(request)
    assert rig.over(job).state == "finished", rig.said(job)
    assert json.loads(rig.said(job)[0]) == [AWKWARD, "".join(AWKWARD), str(folder)]


def test_setup_lines_come_first(rig: Rig) -> None:
    job = rig.engine.launch(rig.request('echo "$FROM_SETUP"', setup=("FROM_SETUP=here", "export FROM_SETUP")))
    broken = rig.engine.launch(rig.request("touch ran", setup=("false",)))
    assert rig.over(job).state == "finished"
    assert rig.said(job) == ["here\n"]
    assert rig.over(broken).state == "failed"


def test_variables_and_secrets(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", SECRET)
    script = 'printf %s "$A_SECRET" | md5sum | cut -c1-32; echo "$PLAIN"'
    request = rig.request(script, environment={"PLAIN": "to see"}, secrets=("A_SECRET",))
    job = rig.engine.launch(request)
    assert rig.over(job).state == "finished"
    assert rig.said(job) == [f"{hashlib.md5(SECRET.encode()).hexdigest()}\nto see\n"]
    assert SECRET not in rig.engine.describe(request)
    files = everything_in(rig.folder)
    assert files
    assert not [path for path, content in files.items() if SECRET.encode() in content]


def test_a_secret_that_is_not_there(rig: Rig) -> None:
    request = rig.request("true", secrets=("NO_SUCH_VARIABLE",))
    with pytest.raises(UsageError, match="NO_SUCH_VARIABLE"):
        rig.engine.launch(request)
    assert not list(request.folder.iterdir())


def test_exit_75_has_it_started_again(rig: Rig) -> None:
    request = rig.request('echo >>lives; [ "$(wc -l <lives)" = 2 ] || exit 75; echo second')
    job = rig.engine.launch(request)
    status = rig.over(job)
    assert (status.state, status.exit_status, status.starts) == ("finished", 0, 2)
    assert rig.said(job) == ["", "second\n"]


def test_a_signal_has_it_save_and_come_back(rig: Rig) -> None:
    script = '[ -e saved ] && exit 0; trap "echo >saved; exit 75" USR1; echo >up; while :; do sleep 0.1; done'
    request = rig.request(script)
    job = rig.engine.launch(request)
    appears(request.folder / "up")
    assert rig.until(job, "running").machines
    rig.engine.signal(job, signal.SIGUSR1)
    status = rig.over(job)
    assert (status.state, status.starts) == ("finished", 2)


def test_who_is_told_before_it_listens_comes_back(rig: Rig) -> None:
    request = rig.request("[ -e up ] && exit 0; echo >up; exec sleep 1000")
    job = rig.engine.launch(request)
    appears(request.folder / "up")
    rig.until(job, "running")
    rig.engine.signal(job, signal.SIGUSR1)
    status = rig.over(job)
    assert (status.state, status.starts) == ("finished", 2)


def test_cancel_while_it_runs(rig: Rig) -> None:
    request = rig.request('trap "echo >told; exit 75" USR1; echo >up; while :; do sleep 0.1; done')
    job = rig.engine.launch(request)
    appears(request.folder / "up")
    rig.until(job, "running")
    rig.engine.cancel(job)
    rig.engine.cancel(job)
    status = rig.over(job)
    assert (status.state, status.starts) == ("cancelled", 1)
    assert (request.folder / "told").exists()


def test_cancel_of_one_that_does_not_listen(rig: Rig) -> None:
    request = rig.request('trap "" USR1 TERM; echo $$ >up; while :; do sleep 0.1; done', grace_s=1)
    job = rig.engine.launch(request)
    pid = int(appears(request.folder / "up"))
    rig.engine.cancel(job)
    assert rig.over(job).state == "cancelled"
    eventually(lambda: not Path(f"/proc/{pid}").exists(), lambda: f"process {pid} outlives its job")


def test_cancel_while_it_waits(rig: Rig) -> None:
    everything = {"machines": rig.machines, "cpus": rig.cpus}
    script = 'trap "exit 0" USR1; echo >"up-$HEADWAY_MACHINE"; while :; do sleep 0.1; done'
    first, second = (rig.request(script, **everything) for _ in range(2))
    holder = rig.engine.launch(first)
    for machine in range(rig.machines):  # one that is told before it listens is ended by what it is told
        appears(first.folder / f"up-{machine}")
    waiter = rig.engine.launch(second)
    assert rig.until(waiter, "waiting").starts == 0
    with pytest.raises(EngineError, match="waiting"):
        rig.engine.signal(waiter, signal.SIGUSR1)
    rig.engine.cancel(waiter)
    assert rig.over(waiter).state == "cancelled"
    rig.engine.cancel(holder)
    assert rig.over(holder).state == "finished"
    assert not list(second.folder.glob("up-*"))


def test_what_is_over_stays_as_it_is(rig: Rig) -> None:
    job = rig.engine.launch(rig.request("true"))
    before = rig.over(job)
    rig.engine.cancel(job)
    assert rig.engine.status([job])[job] == before
    with pytest.raises(EngineError, match="finished"):
        rig.engine.signal(job, signal.SIGUSR1)


def test_what_can_never_be_is_refused(rig: Rig) -> None:
    for options in ({"machines": rig.machines + 1}, {"gpus": rig.gpus + 1}, {"cpus": rig.cpus + 1000}):
        request = rig.request("touch ran", **options)
        with pytest.raises(UsageError, match=r"\w+ \w+"):
            rig.engine.launch(request)
        assert not [path for path in request.folder.rglob("*") if path.is_file()]


def test_settings_of_the_site_that_do_not_exist(rig: Rig) -> None:
    request = rig.request("true", site={"no_such_setting": "1"})
    for act in (rig.engine.describe, rig.engine.launch):
        with pytest.raises(UsageError, match="no_such_setting"):
            act(request)


def test_an_array(rig: Rig) -> None:
    script = 'echo "$HEADWAY_ARRAY_INDEX"; [ "$HEADWAY_ARRAY_INDEX" != 2 ] || exit 5'
    request = rig.request(script, array=4)
    job = rig.engine.launch(request)
    whole = rig.over(job)
    assert (whole.state, whole.starts, whole.exit_status) == ("failed", 4, 5)
    copies = rig.engine.status([f"{job}_{index}" for index in range(4)])
    assert [status.state for status in copies.values()] == ["finished", "finished", "failed", "finished"]
    assert rig.said(job) == ["0\n", "1\n", "2\n", "3\n"]
    assert rig.said(f"{job}_3") == ["3\n"]


def test_no_more_of_an_array_at_a_time_than_may_be(rig: Rig) -> None:
    """Each writes down how many it sees at work, itself included."""
    script = 'touch "at-$HEADWAY_ARRAY_INDEX"; sleep 0.5; set -- at-*; echo $#; rm "at-$HEADWAY_ARRAY_INDEX"'
    request = rig.request(script, array=5, at_once=2)
    job = rig.engine.launch(request)
    later = rig.engine.launch(rig.request("true"))
    assert rig.over(later).state == "finished"
    assert rig.over(job).state == "finished"
    assert {int(seen) for seen in rig.said(job)} <= {1, 2}


def test_copies_that_wait_for_their_turn_can_be_cancelled(rig: Rig) -> None:
    job = rig.engine.launch(rig.request("sleep 600", array=3, at_once=1, grace_s=0))
    rig.until(f"{job}_0", "running")
    rig.engine.cancel(f"{job}_1")
    assert rig.over(f"{job}_1").state == "cancelled"
    assert rig.engine.status([f"{job}_2"])[f"{job}_2"].state == "waiting"
    rig.engine.cancel(f"{job}_0")
    rig.until(f"{job}_2", "running")
    rig.engine.cancel(job)
    assert rig.over(job).state == "cancelled"


def test_one_command_a_machine(rig: Rig) -> None:
    number = min(2, rig.machines)
    request = rig.request('echo "$HEADWAY_MACHINE of $HEADWAY_MACHINES"', machines=number)
    job = rig.engine.launch(request)
    status = rig.over(job)
    assert (status.state, len(set(status.machines))) == ("finished", number)
    names = ",".join(status.machines)
    assert rig.said(job) == [f"{index} of {names}\n" for index in range(number)]
    assert {machine.name for machine in rig.engine.inventory()} >= set(status.machines)


def test_who_knows_how_the_whole_ended_is_believed(rig: Rig) -> None:
    """Whatever became of the others: first that it is to be started again, then that it is done."""
    if rig.machines == 1:
        return  # there are no others
    knows = 'end=75; [ ! -e saved ] || end=0; echo >saved; echo $end >"$HEADWAY_END"; exit $end'
    request = rig.request(f'[ "$HEADWAY_MACHINE" = 0 ] || exit 9; {knows}', machines=2)
    status = rig.over(rig.engine.launch(request))
    assert (status.state, status.exit_status, status.starts) == ("finished", 0, 2)


def test_machines_to_avoid(rig: Rig) -> None:
    names = [machine.name for machine in rig.engine.inventory()]
    if len(names) == 1:
        with pytest.raises(UsageError, match=names[0]):
            rig.engine.launch(rig.request("true", avoid=tuple(names)))
        return
    job = rig.engine.launch(rig.request("true", avoid=tuple(names[:-1])))
    assert rig.over(job).machines == (names[-1],)


def test_a_machine_that_the_command_suspects_is_avoided_on_the_next_start(rig: Rig) -> None:
    if rig.machines == 1:
        return  # there is no other
    script = 'echo "$HEADWAY_MACHINES" >>been; [ "$(wc -l <been)" = 1 ] || exit 0; '
    script += 'printf "%s\\n" 75 "$HEADWAY_MACHINES" >"$HEADWAY_END"; exit 75'
    request = rig.request(script)
    job = rig.engine.launch(request)
    assert rig.over(job).state == "finished"
    first, second = (request.folder / "been").read_text().split()
    assert first != second


def test_gpus_are_counted(rig: Rig) -> None:
    before = rig.engine.inventory()
    assert [machine.gpus for machine in before] == [rig.gpus] * rig.machines
    request = rig.request('echo "$CUDA_VISIBLE_DEVICES" >gpus; until [ -e end ]; do sleep 0.05; done', gpus=2)
    job = rig.engine.launch(request)
    assert len(appears(request.folder / "gpus").split(",")) == 2
    used = rig.engine.inventory()
    there = {machine.name: machine for machine in used}[rig.until(job, "running").machines[0]]
    assert (there.state, sum(m.gpus_free for m in used)) == ("busy", sum(m.gpus_free for m in before) - 2)
    (request.folder / "end").touch()
    assert rig.over(job).state == "finished"


def test_a_job_nobody_knows(rig: Rig) -> None:
    job = rig.engine.launch(rig.request("true"))
    rig.over(job)
    told = rig.engine.status([job, "99999999", "../../etc"])
    assert [status.state for status in told.values()] == ["finished", "unknown", "unknown"]
    assert rig.engine.logs("99999999") == []
    rig.engine.cancel("99999999")
    assert rig.engine.status([]) == {}


def test_another_process_sees_the_same(rig: Rig) -> None:
    request = rig.request("echo >up; until [ -e end ]; do sleep 0.05; done; echo bye")
    job = rig.engine.launch(request)
    appears(request.folder / "up")
    rig.engine = rig.make()
    assert rig.until(job, "running").starts == 1
    (request.folder / "end").touch()
    assert rig.over(job).state == "finished"
    assert rig.said(job) == ["bye\n"]


def test_to_describe_is_to_do_nothing(rig: Rig) -> None:
    request = rig.request("echo 'to be seen'", setup=("export SETUP=1",))
    text = rig.engine.describe(request)
    assert "to be seen" in text
    assert "export SETUP=1" in text
    assert not list(request.folder.iterdir())


@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_two_hundred_short_jobs(rig: Rig, bereft: object, number: int) -> None:
    request = rig.request("")
    jobs = [rig.engine.launch(replace(request, command=("touch", f"ran-{index}"))) for index in range(number)]
    assert len(set(jobs)) == number

    def over() -> dict[str, JobStatus] | None:
        statuses = rig.engine.status(jobs)
        return statuses if all(status.state in OVER for status in statuses.values()) else None

    statuses = eventually(over, lambda: rig.engine.status(jobs), poll_s=0.1)
    assert {(status.state, status.starts) for status in statuses.values()} == {("finished", 1)}
    assert sum(name.startswith("ran-") for name in os.listdir(request.folder)) == number  # noqa: PTH208


def test_a_lost_machine_is_replaced(rig: Rig, bereft: tuple[str, str]) -> None:
    job, lost = bereft
    if not job:
        return  # there is one machine only, and whoever loses that loses this test too
    status = rig.over(job)
    assert (status.state, status.starts, len(status.machines)) == ("finished", 2, 2)
    assert lost not in status.machines


def test_the_limit_is_told_and_it_goes_on_after_it(rig: Rig, chained: tuple[str, Path]) -> None:
    job, folder = chained
    status = rig.over(job)
    assert (status.state, status.starts) == ("finished", 2)
    assert len((folder / "lives").read_text().splitlines()) == 2
