"""The launcher and its agents, which are short scripts here, so that they can die in every way.

A script runs in place of `python -m headway.agent`. It knows the how-manieth agent of the run it is, leaves files in
the run folder, and sends messages as an agent does.
"""

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventually import CEILING_S, eventually
from headway.agent import Attempt
from headway.agent.launch import launcher

SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys, time

run, channel = sys.argv[4], socket.socket(fileno=int(sys.argv[3]))
generation = sum(name.startswith("agent-") for name in os.listdir(run)) + 1


def note(name, content=""):
    with open(f"{{run}}/making-{{os.getpid()}}", "w") as file:
        file.write(str(content))
    os.rename(f"{{run}}/making-{{os.getpid()}}", f"{{run}}/{{name}}")


def send(kind, **fields):
    channel.sendall(json.dumps({{"kind": kind, "descriptors": 0, **fields}}).encode() + b"\\n")


def end(state="finished", reason="all done", hint=None):
    send("outcome", state=state, reason=reason, hint=hint)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(name):
    while not os.path.exists(f"{{run}}/{{name}}"):
        time.sleep(0.01)


def pass_time(seconds):
    note("pass", seconds)
    while os.path.exists(f"{{run}}/pass"):
        time.sleep(0.01)


note(f"agent-{{generation}}", os.getpid())
{body}
"""

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork, where threads were started


class RunningLauncher:
    """A launcher process, and what its agents leave in the run folder."""

    def __init__(self, run: Path, pid: int) -> None:
        self.run, self.pid = run, pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait_for(self, name: str) -> None:
        """Wait until some agent creates a file of this name."""
        eventually((self.run / name).exists)

    def go(self) -> None:
        """Release the agents that wait for the file `go`."""
        (self.run / "go").touch()

    def sync(self) -> None:
        """Wait until it has done everything that was asked of it so far."""
        (self.run / "making-pass").write_text("0")
        (self.run / "making-pass").rename(self.run / "pass")
        eventually(lambda: not (self.run / "pass").exists())

    def end(self) -> dict[str, Any]:
        """Wait for its end and return what it reported."""
        eventually(lambda: not is_alive(self.pid))
        result: dict[str, Any] = json.loads((self.run / "ended").read_text())
        return result

    @property
    def agents(self) -> int:
        """How many agents it started."""
        return len(list(self.run.glob("agent-*")))


class Clock:
    """A launcher's clock: a file `pass` in the run folder advances it by so many seconds."""

    def __init__(self, run: Path) -> None:
        self._passed_s, self._asked, self._seen = 0.0, run / "pass", False

    def __call__(self) -> float:
        return time.monotonic() + self._passed_s

    def tick(self, _stops_asked: int) -> None:
        """When the file is first seen, messages sent before it may not have been received yet."""
        if self._seen:
            self._passed_s += float(self._asked.read_text())
            self._asked.unlink()
        self._seen = self._asked.exists()


def launch(attempt: Attempt, script: Path) -> None:
    """Be a launcher and nothing else."""
    launcher.POLL_S, launcher.REAP_S = 0.02, CEILING_S
    sys.executable = str(script)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208  (a Path would keep one open)
    clock = Clock(attempt.run)
    outcome = launcher.run_launcher(attempt, clock.tick, clock=clock)
    children = launcher._has_children()
    gc.collect()
    left = set(os.listdir("/proc/self/fd")) - before  # noqa: PTH208
    result = {"outcome": asdict(outcome), "status": outcome.exit_status, "left": len(left), "children": children}
    (attempt.run / "ended").write_text(json.dumps(result))


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], RunningLauncher]]:
    """Start a launcher whose agents run a script; in the end nothing of it is left."""
    running = list[RunningLauncher]()

    def start_launcher(body: str) -> RunningLauncher:
        run, script = tmp_path / "run", tmp_path / "agent"
        run.mkdir()
        script.write_text(SCRIPT.format(python=sys.executable, body=body))
        script.chmod(0o755)
        attempt = Attempt(run=run, number=1, workers=1, device="cpu", threads=1)
        pid = os.fork()
        if not pid:
            try:
                launch(attempt, script)
            except BaseException as error:
                (run / "ended").write_text(json.dumps({"raised": repr(error)}))
            os._exit(0)
        running.append(RunningLauncher(run, pid))
        return running[-1]

    yield start_launcher
    for process in running:
        process.signal(signal.SIGKILL)
        os.waitpid(process.pid, 0)
        pids = [int(path.read_text()) for path in process.run.glob("agent-*")]
        eventually(lambda pids=pids: not any(is_alive(pid) for pid in pids))


# -- an agent that dies


SUCCESSION = """
channel.detach()
sys.path[:0] = {paths}
from headway.agent.__main__ import _receive_attempt
from headway.agent.fd_store import FdStore
from headway.state import Channel

channel = Channel(socket.socket(fileno=int(sys.argv[3])))
entries, attempt = _receive_attempt(channel)
store = FdStore(channel, entries)


def memory(content):
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(descriptor, content.encode())
    return descriptor


def contents(entry):
    return [os.pread(descriptor, 100, 0).decode() for descriptor in entry.descriptors]


note(f"inherited-{generation}", json.dumps({name: [entry.fields, contents(entry)] for name, entry in entries.items()}))
if generation == 1:
    store.put("few", [memory("a"), memory("b")], n=1)
    store.put("many", [memory(str(i)) for i in range(403)], n=2)
    store.put("none", text="é" * 50_000)
    store.put("gone", [memory("x")])
    store.drop("gone")
    die()
if generation == 2:
    store.put("few", [memory("c")], n=3)
    store.drop("none")
    die()
channel.send("outcome", state="finished", reason="", hint=None)
"""


def test_next_agent_inherits_everything_the_last_one_stored(start) -> None:
    """With contents, and more descriptors than a message carries; no descriptor stays open in the launcher."""
    running = start(SUCCESSION.replace("{paths}", repr([path for path in sys.path if path])))
    ended = running.end()
    assert (ended["status"], running.agents, ended["left"]) == (0, 3, 0)
    many = [{"n": 2}, [str(number) for number in range(403)]]
    assert [json.loads((running.run / f"inherited-{generation}").read_text()) for generation in (1, 2, 3)] == [
        {},
        {"few": [{"n": 1}, ["a", "b"]], "many": many, "none": [{"text": "é" * 50_000}, []]},
        {"few": [{"n": 3}, ["c"]], "many": many},
    ]


def test_launcher_gives_up_after_five_deaths_during_start_up(start) -> None:
    running = start("sys.exit(3)")
    ended = running.end()
    assert (ended["status"], ended["outcome"]["state"], running.agents, ended["left"]) == (1, "failed", 5, 0)
    assert "died 5 times" in ended["outcome"]["reason"]
    assert str(running.run / "logs") in ended["outcome"]["hint"]


def test_last_outcome_counts_even_if_the_agent_then_dies(start) -> None:
    """A finished run is not started again: the last message and the exit arrive together."""
    running = start('end("stopped", "as asked", "resume"); die()')
    ended = running.end()
    assert ended["outcome"] == {"state": "stopped", "reason": "as asked", "hint": "resume", "usage": False}
    assert (ended["status"], running.agents, ended["left"]) == (75, 1, 0)


ORPHANS = """
if generation == 1:
    for _ in range(3):
        pid = os.fork()
        if not pid:
            wait_for("agent-2")
            with open(f"{run}/agent-2") as file:
                next_agent = file.read()
            while os.path.exists(f"/proc/{next_agent}"):
                time.sleep(0.01)
            os._exit(0)
        note(f"child-{pid}", pid)
    die()
end()
"""


def test_orphans_of_a_dead_agent_are_reaped(start) -> None:
    """Its children become the launcher's, and none is a zombie or left once that has exited.

    They outlive the next agent, which is the last.
    """
    running = start(ORPHANS)
    ended = running.end()
    assert (ended["status"], running.agents, ended["children"]) == (0, 2, False)
    children = [int(path.read_text()) for path in running.run.glob("child-*")]
    assert len(children) == 3
    assert not any(psutil.pid_exists(pid) for pid in children)


# -- an agent that is silent


def test_stopped_agent_is_continued(start) -> None:
    running = start("send('alive'); pass_time(3); os.kill(os.getpid(), signal.SIGSTOP); end()")
    assert (running.end()["status"], running.agents) == (0, 1)


def test_hung_agent_is_replaced(start) -> None:
    running = start("send('alive')\nif generation < 3: pass_time(121); time.sleep(600)\nend()")
    ended = running.end()
    assert (ended["status"], running.agents, ended["left"]) == (0, 3, 0)


def test_briefly_silent_agent_is_left_alone(start) -> None:
    running = start("send('alive'); pass_time(110); pass_time(0); end()")
    assert (running.end()["status"], running.agents) == (0, 1)


def test_agents_that_die_later_are_always_replaced(start) -> None:
    """However many there are; only five in a row that die during start-up are too many."""
    running = start("send('alive')\nif generation < 7: pass_time(11); die()\nend()")
    assert (running.end()["status"], running.agents) == (0, 7)


# -- stop signals


LISTENER = """
asked = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: asked.append(number))
send("alive")
note(f"listens-{generation}")
while not asked:
    time.sleep(0.01)
    send("alive")
note("asked")
wait_for("go")
end("stopped", f"asked {len(asked)}")
"""


@pytest.mark.parametrize(
    ("numbers", "asked"),
    [
        ([signal.SIGTERM], 1),
        ([signal.SIGINT, signal.SIGHUP], 2),
        ([signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR1], 1),
        ([signal.SIGUSR1, signal.SIGTERM], 2),
    ],
    ids=lambda value: "+".join(number.name for number in value) if isinstance(value, list) else "",
)
def test_stop_signals_reach_the_agent(start, numbers: list[signal.Signals], asked: int) -> None:
    """A batch system's warning (SIGUSR1) never hurries a run, however often it comes."""
    running = start(LISTENER)
    running.wait_for("listens-1")
    for number in numbers:
        running.signal(number)
        running.wait_for("asked")
        running.sync()
    running.go()
    ended = running.end()
    assert (ended["outcome"]["reason"], ended["status"], running.agents) == (f"asked {asked}", 75, 1)


@pytest.mark.parametrize("slowly", [False, True], ids=["at once", "slowly"])
def test_stop_before_the_agent_is_ready_is_held_back(start, slowly: bool) -> None:
    """The agent would die of the signal, and the next one too."""
    early = "wait_for('go')" if slowly else ""
    running = start(f"note('starts')\n{early}\n{LISTENER}")
    running.wait_for("starts")
    running.signal(signal.SIGTERM)
    if slowly:
        running.sync()
    running.go()
    ended = running.end()
    assert (ended["outcome"]["reason"], ended["status"], running.agents) == ("asked 1", 75, 1)


def test_stop_received_by_a_dead_agent_is_repeated_to_the_next(start) -> None:
    running = start(LISTENER.replace('note("asked")', "if generation < 3: die()"))
    running.wait_for("listens-1")
    running.go()
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert (ended["outcome"]["reason"], ended["status"], running.agents) == ("asked 1", 75, 3)


def test_two_stops_end_a_run_whose_agent_dies(start) -> None:
    running = start(LISTENER.replace('note("asked")', 'note("asked"); wait_for("go"); die()'))
    running.wait_for("listens-1")
    running.signal(signal.SIGTERM)
    running.wait_for("asked")
    running.signal(signal.SIGINT)
    running.sync()
    running.go()
    ended = running.end()
    assert (ended["outcome"]["state"], ended["status"], running.agents) == ("stopped", 75, 1)
    assert "at once" in ended["outcome"]["reason"]
