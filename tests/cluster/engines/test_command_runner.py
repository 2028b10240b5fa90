"""The guard of a command: passes signals on, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eventually import CEILING_S, eventually
from headway.cluster.engines.ray import command_runner as guard


class Guarded:
    """A guard, and what its command prints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"

    def start(self, *words: str, **order: Any) -> "Guarded":
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        environment = {"PATH": os.environ["PATH"]}
        whole = {"words": words, "folder": str(self.folder), "log": str(self.log), "environment": environment, **order}
        self.tell(whole)
        return self

    def tell(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def lines(self, count: int) -> list[str]:
        """What the command has printed, once that is so many lines."""

        def printed() -> list[str] | None:
            found = self.log.read_text().splitlines() if self.log.exists() else []
            return found if len(found) >= count else None

        return eventually(printed, lambda: f"{self.log}: fewer than {count} lines")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    one = Guarded(tmp_path)
    yield one
    assert one.process.stdin is not None
    assert one.process.stdout is not None
    one.process.stdin.close()
    one.process.stdout.close()
    one.process.wait(CEILING_S)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    return eventually(lambda: not is_alive(pid), lambda: f"process {pid} is still there")


@pytest.mark.parametrize(("line", "status"), [("true", 0), ("exit 75", 75), ("kill -KILL $$", 137)])
def test_its_status_is_the_commands(guarded: Guarded, line: str, status: int) -> None:
    assert guarded.start("sh", "-c", line).process.wait(CEILING_S) == status


def test_a_command_that_is_not_there_says_so_in_the_log(guarded: Guarded) -> None:
    assert guarded.start("no-such-program").process.wait(CEILING_S) == 127
    assert guarded.log.read_text() == "no-such-program: No such file or directory\n"


def test_a_log_that_cannot_be_written_is_told_to_who_watches(guarded: Guarded) -> None:
    guarded.start("true", log=str(guarded.folder / "none" / "log"))
    assert guarded.process.wait(CEILING_S) == 126
    assert guarded.process.stdout is not None
    assert "none/log: No such file" in guarded.process.stdout.read()


def test_a_signal_goes_to_the_command_alone(guarded: Guarded) -> None:
    story = "trap 'echo heard; exit 75' USR1; sh -c 'sleep 60' & echo $!; while :; do sleep 0.05; done"
    guarded.start("sh", "-c", story)
    child = int(guarded.lines(1)[0])
    guarded.tell(f"signal {int(signal.SIGUSR1)}")
    assert guarded.process.wait(CEILING_S) == 75
    assert guarded.lines(2)[1] == "heard"
    assert gone(child), "what a command leaves behind ends with it"


STORY = "import os, subprocess, time; print(os.getpid(), flush=True); child = subprocess.Popen(['sleep', '60'], \
start_new_session=True); print(child.pid, flush=True); time.sleep(60)"


def test_when_nobody_watches_any_more_all_of_it_ends_at_once(guarded: Guarded) -> None:
    guarded.start(sys.executable, "-c", STORY)
    pids = [int(line) for line in guarded.lines(2)]
    assert all(map(is_alive, pids))
    assert guarded.process.stdin is not None
    guarded.process.stdin.close()
    guarded.process.wait(CEILING_S)
    assert all(map(gone, pids)), "even one in a session of its own"


def test_a_killed_guard_takes_the_command_along(guarded: Guarded) -> None:
    guarded.start("sh", "-c", "echo $$; exec sleep 60")
    command = int(guarded.lines(1)[0])
    guarded.process.kill()
    assert gone(command)


def test_kill_ends_what_ignores_everything_else(guarded: Guarded) -> None:
    guarded.start("sh", "-c", "trap '' USR1 TERM; echo on; while :; do sleep 0.05; done")
    guarded.lines(1)
    guarded.tell(f"signal {int(signal.SIGUSR1)}")
    guarded.tell("kill")
    assert guarded.process.wait(CEILING_S) == 137


def test_what_is_wished_in_the_same_breath_is_heard(guarded: Guarded) -> None:
    order = {"words": ["sleep", "600"], "folder": str(guarded.folder), "log": str(guarded.log), "environment": {}}
    order["environment"] = {"PATH": os.environ["PATH"]}
    guarded.process = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert guarded.process.stdin is not None
    guarded.process.stdin.write(f'{json.dumps(order)}\n"signal {int(signal.SIGUSR1)}"\n"kill"\n')
    guarded.process.stdin.flush()
    assert guarded.process.wait(CEILING_S) in (128 + signal.SIGUSR1, 128 + signal.SIGKILL)
