"""Machines of a run, all of them this one: on each, what an engine would start there."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from conftest import Lived
from eventually import CEILING_S, eventually
from headway.agent import new_run
from headway.recipe import Recipe
from headway.track.runs import RunFolder

PROGRAM = "from headway.cli.main import main; main()"
KEY = "a key of the tests, and long enough"
HIDES = 'mount -t tmpfs nothing "$0" && exec "$@"'
"""A machine's view of its disks, in which a folder is empty."""


@dataclass
class Machines:
    """The agents of a run, by the number of their machine."""

    run: RunFolder
    count: int
    """Those that have workers."""
    spares: int
    workers: int
    prefix: Callable[[int], Sequence[str]] = lambda _number: ()
    """What goes before the command on a machine."""
    host: Callable[[int], str] = lambda _number: "127.0.0.1"
    apart: int = 0
    """The port at which the first leads those that have no folder in common with it; 0 where all see one."""
    store: str = ""
    """The run's address in its store, where that tells who leads."""
    processes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, number: int, rank: int | None = None) -> None:
        """Start the agent of one machine, of the rank of its number if not another."""
        rank = number if rank is None else rank
        words = ["agent", "--run", self.run.name, "--runs", str(self.run.path.parent)]
        words += ["--nodes", str(self.count), "--workers", str(self.workers)]
        words += ["--spares", str(self.spares), "--rank", str(rank), "--host", self.host(number)]
        prefix = self.prefix(number)
        if self.apart and number == 0:
            words += ["--port", str(self.apart)]
        elif self.apart:
            words = ["agent", "--join", f"{self.host(0)}:{self.apart}", "--rank", str(rank)]
        elif self.store and number == 0:
            words += ["--no-shared-folder"]
        elif self.store:
            words[2] = self.store
        if number and (self.apart or self.store):
            words += ["--runs", str(self.root(number))]
            prefix = [*prefix, "unshare", "--mount", "sh", "-c", HIDES, str(self.run.path.parent)]
        with (self.run.path / f"machine-{number}.log").open("ab") as log:
            self.processes[number] = subprocess.Popen(
                [*prefix, sys.executable, "-c", PROGRAM, *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HEADWAY_MACHINES": "a,b,c,d", "HEADWAY_KEY": KEY},
            )  # fmt: skip

    def root(self, number: int) -> Path:
        """Where a machine that does not see the run's folder has one of its own."""
        return self.run.path.parent.with_name(f"root-{number}")

    def everything_of(self, number: int) -> list[psutil.Process]:
        """Every process of a machine."""
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.processes[number].pid)
            return [first, *first.children(recursive=True)]
        return []

    def lose(self, number: int) -> None:
        """All that a machine does ends in one instant."""
        found = self.everything_of(number)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in [*found, *self.everything_of(number)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.processes.pop(number).wait()

    def until(self, is_true: Callable[[], object]) -> None:
        """Wait for something, as long as a machine is left that could bring it about."""

        def happened() -> bool:
            if is_true():
                return True
            assert any(process.poll() is None for process in self.processes.values()), self.said()
            return False

        eventually(happened, self.said)

    def ends(self) -> dict[int, int]:
        """What each machine's agent exits with."""

        def all_ended() -> bool:
            return all(process.poll() is not None for process in self.processes.values())

        eventually(all_ended, self.said, ceiling_s=2 * CEILING_S)
        return {number: process.returncode for number, process in self.processes.items()}

    def said(self) -> str:
        """What all of them have printed, and the agents' own logs."""
        logs = [*self.run.path.glob("machine-*.log"), *self.run.logs.glob("*-agent.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(logs))

    def events(self, kind: str) -> list[dict]:
        """What the agents that led have recorded."""
        found = []
        for record in sorted(self.run.events.glob("*-agent.jsonl")):
            for line in record.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found += [event] if (event := json.loads(line)).get("kind") == kind else []
        return found

    @property
    def ways_on(self) -> list[str]:
        """How the run went on after each attempt that failed."""
        return [event["recovery"] for event in self.events("end") if "recovery" in event]

    def assert_same_end(self, other: Lived) -> None:
        """The run has come to what another one has, to the bit."""
        assert (self.lived.chain, self.lived.digest) == (other.chain, other.digest), self.said()

    def copied(self) -> int:
        """The newest step whose state lies on two machines."""
        return max((event["step"] for event in self.events("copied")), default=-1)

    @property
    def lived(self) -> Lived:
        return Lived(self.run, None)


@contextlib.contextmanager
def machines(recipe: Recipe, folder: Path, count: int, spares: int, workers: int, **more: object) -> Iterator[Machines]:
    """The machines of a new run, none started; whatever is left of them ends with this."""
    attempt = new_run(recipe, folder / "runs", name="run", workers=workers)
    made = Machines(RunFolder(attempt.run), count, spares, workers, **more)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for number in list(made.processes):
            made.lose(number)
