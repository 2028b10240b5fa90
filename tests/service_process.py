"""A `headway up` of its own for tests: started, killed and started again."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from eventually import eventually
from headway.cluster.service.connection import ADDRESS, service_folder


class ServiceProcess:
    """The service of a folder of runs, in a process of its own."""

    def __init__(self, runs: Path, *options: str) -> None:
        self.runs, self._options = runs, options
        self.log = runs.parent / f"{runs.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: dict[str, str] | None = None, *, wait: bool = True) -> None:
        """Start it, and wait until it listens."""
        address = service_folder(self.runs) / ADDRESS
        address.unlink(missing_ok=True)
        program = [sys.executable, "-c", "from headway.cli.main import main; main()", "up", "--port", "0"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*program, "--runs", str(self.runs), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        if wait:
            eventually(lambda: address.exists() or not self.alive, self.log.read_text)
            assert self.alive, self.log.read_text()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, which leaves it no time for anything."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Wait for its end."""
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> int:
        """Ctrl-C."""
        assert self._process is not None
        if self.alive:
            os.kill(self._process.pid, signal.SIGINT)
        return self._process.wait()


def headway(runs: Path, *words: str, status: int = 0) -> str:
    """The output of a verb for a folder of runs."""
    program = [sys.executable, "-c", "from headway.cli.main import main; main()", words[0], "--runs", str(runs)]
    done = subprocess.run([*program, *words[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == status, (words, done.stdout, done.stderr)
    return done.stdout if not status else done.stderr


def headway_json(runs: Path, *words: str) -> object:
    """The --json output of a verb."""
    at: Sequence[str] = words[: words.index("--")] if "--" in words else words
    return json.loads(headway(runs, *at, "--json", *words[len(at) :]))
