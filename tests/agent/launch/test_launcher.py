"""The keeper and its agents. Most agents here are short scripts, so that they can die in every way; the last are real.

A script is run where `python -m headway.agent` would be. It knows which life of the run's agent it is, leaves files in
the run's folder, and speaks as an agent does.
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
from headway.agent.launch import launcher as keeper

SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys, time

run, line = sys.argv[4], socket.socket(fileno=int(sys.argv[3]))
life = sum(name.startswith("life-") for name in os.listdir(run)) + 1


def note(name, content=""):
    with open(f"{{run}}/making-{{os.getpid()}}", "w") as file:
        file.write(str(content))
    os.rename(f"{{run}}/making-{{os.getpid()}}", f"{{run}}/{{name}}")


def tell(kind, **fields):
    line.sendall(json.dumps({{"kind": kind, "descriptors": 0, **fields}}).encode() + b"\\n")


def say(state="finished", reason="all done", hint=None):
    tell("outcome", state=state, reason=reason, hint=hint)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(name):
    while not os.path.exists(f"{{run}}/{{name}}"):
        time.sleep(0.01)


def pass_time(seconds):
    note("pass", seconds)
    while os.path.exists(f"{{run}}/pass"):
        time.sleep(0.01)


note(f"life-{{life}}", os.getpid())
{body}
"""

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork, where threads were started


class Kept:
    """A keeper at work, and what its agents leave in the run's folder."""

    def __init__(self, run: Path, pid: int) -> None:
        self.run, self.pid = run, pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait_for(self, name: str) -> None:
        """Until some agent makes a file of this name."""
        eventually((self.run / name).exists)

    def go(self) -> None:
        """Let agents go on that wait for it."""
        (self.run / "go").touch()

    def sync(self) -> None:
        """Until it has done everything that was asked of it so far."""
        (self.run / "making-pass").write_text("0")
        (self.run / "making-pass").rename(self.run / "pass")
        eventually(lambda: not (self.run / "pass").exists())

    def end(self) -> dict[str, Any]:
        """What it comes to."""
        eventually(lambda: not is_alive(self.pid))
        found: dict[str, Any] = json.loads((self.run / "ended").read_text())
        return found

    @property
    def lives(self) -> int:
        """How many agents there were."""
        return len(list(self.run.glob("life-*")))


class Clock:
    """A keeper's clock: whoever leaves a file `pass` in the run's folder has it go on by so many seconds."""

    def __init__(self, run: Path) -> None:
        self._passed_s, self._asked, self._seen = 0.0, run / "pass", False

    def __call__(self) -> float:
        return time.monotonic() + self._passed_s

    def tick(self, _stops_asked: int) -> None:
        """The first time that the file is seen, what was said or sent before it may not have been heard yet."""
        if self._seen:
            self._passed_s += float(self._asked.read_text())
            self._asked.unlink()
        self._seen = self._asked.exists()


def keep_alone(attempt: Attempt, script: Path, settings: dict[str, float]) -> None:
    """What a process does that is a keeper and nothing else."""
    for name, value in ({"POLL_S": 0.02, "LAST_S": CEILING_S} | settings).items():
        setattr(keeper, name, value)
    sys.executable = str(script)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208  (a Path would keep one open)
    clock = Clock(attempt.run)
    outcome = keeper.run_launcher(attempt, clock.tick, clock=clock)
    children = keeper._has_children()
    gc.collect()
    left = set(os.listdir("/proc/self/fd")) - before  # noqa: PTH208
    told = {"outcome": asdict(outcome), "status": outcome.exit_status, "left": len(left), "children": children}
    (attempt.run / "ended").write_text(json.dumps(told))


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    """Starts a keeper whose agents do what a script says; in the end nothing of it is left."""
    made = list[Kept]()

    def start(body: str, **settings: float) -> Kept:
        run, script = tmp_path / "run", tmp_path / "agent"
        run.mkdir()
        script.write_text(SCRIPT.format(python=sys.executable, body=body))
        script.chmod(0o755)
        attempt = Attempt(run=run, number=1, workers=1, device="cpu", threads=1)
        pid = os.fork()
        if not pid:
            try:
                keep_alone(attempt, script, settings)
            except BaseException as error:
                (run / "ended").write_text(json.dumps({"raised": repr(error)}))
            os._exit(0)
        made.append(Kept(run, pid))
        return made[-1]

    yield start
    for kept in made:
        kept.signal(signal.SIGKILL)
        os.waitpid(kept.pid, 0)
        pids = [int(path.read_text()) for path in kept.run.glob("life-*")]
        eventually(lambda pids=pids: not any(is_alive(pid) for pid in pids))


# -- an agent that dies


HEIRS = """
line.detach()
sys.path[:0] = {paths}
from headway.agent.__main__ import _handed_over
from headway.agent.fd_store import Kept
from headway.state import Line

line = Line(socket.socket(fileno=int(sys.argv[3])))
things, attempt = _handed_over(line)
kept = Kept(line, things)


def memory(content):
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(descriptor, content.encode())
    return descriptor


def lies(thing):
    return [os.pread(descriptor, 100, 0).decode() for descriptor in thing.descriptors]


note(f"found-{life}", json.dumps({name: [thing.fields, lies(thing)] for name, thing in kept.entries.items()}))
if life == 1:
    kept.put("few", [memory("a"), memory("b")], n=1)
    kept.put("many", [memory(str(number)) for number in range(403)], n=2)
    kept.put("none", text="é" * 50_000)
    kept.put("gone", [memory("x")])
    kept.drop("gone")
    die()
if life == 2:
    kept.put("few", [memory("c")], n=3)
    kept.drop("none")
    die()
line.send("outcome", state="finished", reason="", hint=None)
"""


def test_the_next_agent_has_all_that_the_last_one_put_aside(keep) -> None:
    """Content and all, and more descriptors than a message carries; nothing of it stays with the keeper."""
    one = keep(HEIRS.replace("{paths}", repr([path for path in sys.path if path])))
    ended = one.end()
    assert (ended["status"], one.lives, ended["left"]) == (0, 3, 0)
    many = [{"n": 2}, [str(number) for number in range(403)]]
    assert [json.loads((one.run / f"found-{life}").read_text()) for life in (1, 2, 3)] == [
        {},
        {"few": [{"n": 1}, ["a", "b"]], "many": many, "none": [{"text": "é" * 50_000}, []]},
        {"few": [{"n": 3}, ["c"]], "many": many},
    ]


def test_agents_that_die_as_they_start_are_given_up(keep) -> None:
    one = keep("sys.exit(3)")
    ended = one.end()
    assert (ended["status"], ended["outcome"]["state"], one.lives, ended["left"]) == (1, "failed", 5, 0)
    assert "died 5 times" in ended["outcome"]["reason"]
    assert str(one.run / "logs") in ended["outcome"]["hint"]


def test_what_an_agent_says_last_counts_though_it_dies_of_it(keep) -> None:
    """A run that is over is not begun again: the last word and the end come at once."""
    one = keep('say("stopped", "as asked", "resume"); die()')
    ended = one.end()
    assert ended["outcome"] == {"state": "stopped", "reason": "as asked", "hint": "resume"}
    assert (ended["status"], one.lives, ended["left"]) == (75, 1, 0)


ORPHANS = """
if life == 1:
    for _ in range(3):
        pid = os.fork()
        if not pid:
            wait_for("life-2")
            with open(f"{run}/life-2") as file:
                next_agent = file.read()
            while os.path.exists(f"/proc/{next_agent}"):
                time.sleep(0.01)
            os._exit(0)
        note(f"child-{pid}", pid)
    die()
say()
"""


def test_what_a_dead_agent_leaves_behind_is_waited_for(keep) -> None:
    """Its children become the keeper's, and none is a zombie or left when that is gone.

    They outlive the next agent, which is the last.
    """
    one = keep(ORPHANS)
    ended = one.end()
    assert (ended["status"], one.lives, ended["children"]) == (0, 2, False)
    children = [int(path.read_text()) for path in one.run.glob("child-*")]
    assert len(children) == 3
    assert not any(psutil.pid_exists(pid) for pid in children)


# -- an agent that is silent


def test_a_stopped_agent_is_woken(keep) -> None:
    one = keep("tell('alive'); pass_time(3); os.kill(os.getpid(), signal.SIGSTOP); say()")
    assert (one.end()["status"], one.lives) == (0, 1)


def test_an_agent_that_hangs_is_followed_by_another(keep) -> None:
    one = keep("tell('alive')\nif life < 3: pass_time(121); time.sleep(600)\nsay()")
    ended = one.end()
    assert (ended["status"], one.lives, ended["left"]) == (0, 3, 0)


def test_an_agent_that_is_silent_for_a_while_is_left_alone(keep) -> None:
    one = keep("tell('alive'); pass_time(110); pass_time(0); say()")
    assert (one.end()["status"], one.lives) == (0, 1)


def test_agents_that_die_after_a_while_are_not_given_up(keep) -> None:
    """However many there are; only five in a row that die as they begin are too many."""
    one = keep("tell('alive')\nif life < 7: pass_time(11); die()\nsay()")
    assert (one.end()["status"], one.lives) == (0, 7)


# -- what is asked of it


LISTENER = """
asked = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: asked.append(number))
tell("alive")
note(f"listens-{life}")
while not asked:
    time.sleep(0.01)
    tell("alive")
note("asked")
wait_for("go")
say("stopped", f"asked {len(asked)}")
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
def test_stops_travel(keep, numbers: list[signal.Signals], asked: int) -> None:
    """A batch system's warning never hurries a run, however often it comes."""
    one = keep(LISTENER)
    one.wait_for("listens-1")
    for number in numbers:
        one.signal(number)
        one.wait_for("asked")
        one.sync()
    one.go()
    ended = one.end()
    assert (ended["outcome"]["reason"], ended["status"], one.lives) == (f"asked {asked}", 75, 1)


@pytest.mark.parametrize("slowly", [False, True], ids=["at once", "slowly"])
def test_a_stop_that_comes_before_the_agent_listens_waits_for_it(keep, slowly: bool) -> None:
    """It would die of the signal, and the next one too."""
    early = "wait_for('go')" if slowly else ""
    one = keep(f"note('starts')\n{early}\n{LISTENER}")
    one.wait_for("starts")
    one.signal(signal.SIGTERM)
    if slowly:
        one.sync()
    one.go()
    ended = one.end()
    assert (ended["outcome"]["reason"], ended["status"], one.lives) == ("asked 1", 75, 1)


def test_a_stop_that_the_dead_agent_heard_is_told_to_the_next(keep) -> None:
    one = keep(LISTENER.replace('note("asked")', "if life < 3: die()"))
    one.wait_for("listens-1")
    one.go()
    one.signal(signal.SIGTERM)
    ended = one.end()
    assert (ended["outcome"]["reason"], ended["status"], one.lives) == ("asked 1", 75, 3)


def test_two_stops_end_a_run_whose_agent_dies(keep) -> None:
    one = keep(LISTENER.replace('note("asked")', 'note("asked"); wait_for("go"); die()'))
    one.wait_for("listens-1")
    one.signal(signal.SIGTERM)
    one.wait_for("asked")
    one.signal(signal.SIGINT)
    one.sync()
    one.go()
    ended = one.end()
    assert (ended["outcome"]["state"], ended["status"], one.lives) == ("stopped", 75, 1)
    assert "at once" in ended["outcome"]["reason"]
