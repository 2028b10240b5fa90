"""The command runner forwards signals and leaves nothing behind."""

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
from headway.cluster.engines.ray import command_runner


class Runner:
    """A command runner, and what its command prints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"

    def start(self, *command: str, **order: Any) -> "Runner":
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", command_runner.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        environment = {"PATH": os.environ["PATH"]}
        message = {
            "words": command,
            "folder": str(self.folder),
            "log": str(self.log),
            "environment": environment,
            **order,
        }
        self.send(message)
        return self

    def send(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def lines(self, count: int) -> list[str]:
        """Wait until the command has printed that many lines, and return them."""

        def printed() -> list[str] | None:
            lines = self.log.read_text().splitlines() if self.log.exists() else []
            return lines if len(lines) >= count else None

        return eventually(printed, lambda: f"{self.log}: fewer than {count} lines")


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    started = Runner(tmp_path)
    yield started
    assert started.process.stdin is not None
    assert started.process.stdout is not None
    started.process.stdin.close()
    started.process.stdout.close()
    started.process.wait(CEILING_S)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def exits(pid: int) -> bool:
    return eventually(lambda: not is_alive(pid), lambda: f"process {pid} still runs")


@pytest.mark.parametrize(("line", "status"), [("true", 0), ("exit 75", 75), ("kill -KILL $$", 137)])
def test_runner_exits_with_the_commands_status(runner: Runner, line: str, status: int) -> None:
    assert runner.start("sh", "-c", line).process.wait(CEILING_S) == status


def test_missing_command_is_reported_in_the_log(runner: Runner) -> None:
    assert runner.start("no-such-program").process.wait(CEILING_S) == 127
    assert runner.log.read_text() == "no-such-program: No such file or directory\n"


def test_unwritable_log_is_reported_on_standard_output(runner: Runner) -> None:
    runner.start("true", log=str(runner.folder / "none" / "log"))
    assert runner.process.wait(CEILING_S) == 126
    assert runner.process.stdout is not None
    assert "none/log: No such file" in runner.process.stdout.read()


def test_signal_reaches_the_command_only(runner: Runner) -> None:
    script = "trap 'echo signalled; exit 75' USR1; sh -c 'sleep 60' & echo $!; while :; do sleep 0.05; done"
    runner.start("sh", "-c", script)
    child = int(runner.lines(1)[0])
    runner.send(f"signal {int(signal.SIGUSR1)}")
    assert runner.process.wait(CEILING_S) == 75
    assert runner.lines(2)[1] == "signalled"
    assert exits(child), "what a command leaves behind is killed"


PROGRAM = "import os, subprocess, time; print(os.getpid(), flush=True); child = subprocess.Popen(['sleep', '60'], \
start_new_session=True); print(child.pid, flush=True); time.sleep(60)"


def test_everything_is_killed_when_standard_input_closes(runner: Runner) -> None:
    runner.start(sys.executable, "-c", PROGRAM)
    pids = [int(line) for line in runner.lines(2)]
    assert all(map(is_alive, pids))
    assert runner.process.stdin is not None
    runner.process.stdin.close()
    runner.process.wait(CEILING_S)
    assert all(map(exits, pids)), "even one in its own session"


def test_killed_runner_takes_the_command_along(runner: Runner) -> None:
    runner.start("sh", "-c", "echo $$; exec sleep 60")
    command = int(runner.lines(1)[0])
    runner.process.kill()
    assert exits(command)


def test_kill_ends_a_command_that_ignores_signals(runner: Runner) -> None:
    runner.start("sh", "-c", "trap '' USR1 TERM; echo on; while :; do sleep 0.05; done")
    runner.lines(1)
    runner.send(f"signal {int(signal.SIGUSR1)}")
    runner.send("kill")
    assert runner.process.wait(CEILING_S) == 137


def test_messages_sent_with_the_order_are_not_lost(runner: Runner) -> None:
    order = {"words": ["sleep", "600"], "folder": str(runner.folder), "log": str(runner.log), "environment": {}}
    order["environment"] = {"PATH": os.environ["PATH"]}
    runner.process = subprocess.Popen(
        [sys.executable, "-I", "-S", command_runner.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert runner.process.stdin is not None
    runner.process.stdin.write(f'{json.dumps(order)}\n"signal {int(signal.SIGUSR1)}"\n"kill"\n')
    runner.process.stdin.flush()
    assert runner.process.wait(CEILING_S) in (128 + signal.SIGUSR1, 128 + signal.SIGKILL)
