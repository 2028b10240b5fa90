"""Simulated machines of a run, all on this host: each runs the agent that an engine would start there."""

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
from headway.track.run_folder import RunFolder

PROGRAM = "from headway.cli.main import main; main()"
KEY = "a key of the tests, and long enough"
HIDE = 'mount -t tmpfs nothing "$0" && exec "$@"'
"""Mounts an empty folder over one, for one process."""


@dataclass
class Machines:
    """The agents of a run, by machine number."""

    run: RunFolder
    count: int
    """Machines with workers."""
    spares: int
    workers: int
    prefix: Callable[[int], Sequence[str]] = lambda _number: ()
    """Prefix of the command on a machine."""
    host: Callable[[int], str] = lambda _number: "127.0.0.1"
    join_port: int = 0
    """Where the first machine lets machines without its folder join; 0 if all share the folder."""
    store: str = ""
    """The run's address in its store, if the leader lease is there."""
    processes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, number: int, rank: int | None = None) -> None:
        """Start the agent of one machine; its rank is its number by default."""
        rank = number if rank is None else rank
        arguments = ["agent", "--run", self.run.name, "--runs", str(self.run.path.parent)]
        arguments += ["--nodes", str(self.count), "--workers", str(self.workers)]
        arguments += ["--spares", str(self.spares), "--rank", str(rank), "--host", self.host(number)]
        prefix = self.prefix(number)
        if self.join_port and number == 0:
            arguments += ["--port", str(self.join_port)]
        elif self.join_port:
            arguments = ["agent", "--join", f"{self.host(0)}:{self.join_port}", "--rank", str(rank)]
        elif self.store and number == 0:
            arguments += ["--no-shared-folder"]
        elif self.store:
            arguments[2] = self.store
        if number and (self.join_port or self.store):
            arguments += ["--runs", str(self.root(number))]
            prefix = [*prefix, "unshare", "--mount", "sh", "-c", HIDE, str(self.run.path.parent)]
        with (self.run.path / f"machine-{number}.log").open("ab") as log:
            self.processes[number] = subprocess.Popen(
                [*prefix, sys.executable, "-c", PROGRAM, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HEADWAY_MACHINES": "a,b,c,d", "HEADWAY_KEY": KEY},
            )  # fmt: skip

    def root(self, number: int) -> Path:
        """The runs folder of a machine that does not share the run's folder."""
        return self.run.path.parent.with_name(f"root-{number}")

    def processes_of(self, number: int) -> list[psutil.Process]:
        """All processes of a machine."""
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.processes[number].pid)
            return [first, *first.children(recursive=True)]
        return []

    def lose(self, number: int) -> None:
        """Kill all processes of a machine at once."""
        processes = self.processes_of(number)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in [*processes, *self.processes_of(number)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.processes.pop(number).wait()

    def until(self, is_true: Callable[[], object]) -> None:
        """Wait for a condition, as long as some machine is running."""

        def check() -> bool:
            if is_true():
                return True
            assert any(process.poll() is None for process in self.processes.values()), self.output()
            return False

        eventually(check, self.output)

    def wait(self) -> dict[int, int]:
        """Wait for all agents and return their exit statuses."""

        def all_ended() -> bool:
            return all(process.poll() is not None for process in self.processes.values())

        eventually(all_ended, self.output, ceiling_s=2 * CEILING_S)
        return {number: process.returncode for number, process in self.processes.items()}

    def output(self) -> str:
        """The output of all machines and the agents' logs."""
        logs = [*self.run.path.glob("machine-*.log"), *self.run.logs.glob("*-agent.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(logs))

    def events(self, kind: str) -> list[dict]:
        """The events of a kind that leaders have recorded."""
        events = []
        for record in sorted(self.run.events.glob("*-agent.jsonl")):
            for line in record.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    events += [event] if (event := json.loads(line)).get("kind") == kind else []
        return events

    @property
    def recoveries(self) -> list[str]:
        """How the run recovered from each failed attempt."""
        return [event["recovery"] for event in self.events("end") if "recovery" in event]

    def assert_same_end(self, other: Lived) -> None:
        """The run ended bit for bit as another."""
        assert (self.ended_run.chain, self.ended_run.digest) == (other.chain, other.digest), self.output()

    def copied(self) -> int:
        """The newest step with copies on two machines."""
        return max((event["step"] for event in self.events("copied")), default=-1)

    @property
    def ended_run(self) -> Lived:
        return Lived(self.run, None)


@contextlib.contextmanager
def make_machines(
    recipe: Recipe, folder: Path, count: int, spares: int, workers: int, **more: object
) -> Iterator[Machines]:
    """The machines of a new run, none started; kill what is left of them at the end."""
    attempt = new_run(recipe, folder / "runs", name="run", workers=workers)
    machines = Machines(RunFolder(attempt.run), count, spares, workers, **more)  # type: ignore[arg-type]
    try:
        yield machines
    finally:
        for number in list(machines.processes):
            machines.lose(number)
