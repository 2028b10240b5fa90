"""Live runs are found by their processes: real ones here, that only look like agents."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventually import eventually
from headway.agent.live_runs import LiveRun, list_live_runs
from headway.track import RunFolder, create_run, run_id

SLEEP = "import time\ntime.sleep(600)\n"
LEADER = """
import subprocess, sys
from pathlib import Path
with open(Path(sys.argv[2]) / "logs" / "0001-zygote.log", "ab") as log:
    subprocess.run([sys.executable, "-m", "headway.train.zygote", "6"], stdout=log)
"""
NODE = """
import subprocess, sys
with open(sys.argv[1], "ab") as log:
    subprocess.run([sys.executable, "-m", "headway.train.zygote", "6"], stdout=log)
"""
ZYGOTE = """
import os, time
from pathlib import Path
for name in ("hw two rank-0", "hw-spare"):
    if not os.fork():
        Path("/proc/self/comm").write_text(name)
        break
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Start `python WORDS` with agents and zygotes that do nothing; all of them end with the test."""
    for name, text in {"agent/__main__.py": SLEEP, "train/zygote.py": ZYGOTE}.items():
        path = tmp_path / "code" / "headway" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    (tmp_path / "code" / "headway" / "__init__.py").touch()
    (tmp_path / "node.py").write_text(NODE)
    started = list["subprocess.Popen[bytes]"]()

    def start_process(*words: str) -> "subprocess.Popen[bytes]":
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "code")}
        started.append(
            subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment, start_new_session=True)
        )
        return started[-1]

    yield start_process
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()


def find(run: RunFolder) -> LiveRun | None:
    return next((live for live in list_live_runs() if live.run.path == run.path), None)


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(pid for child in children for pid in descendants(child))]


def named(name: str, pids: list[int]) -> tuple[int, ...]:
    return tuple(sorted(pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == name))


def test_nodes_on_this_machine_count_for_their_run(start, tmp_path: Path) -> None:
    two, other = (create_run(tmp_path / "runs", "r", name) for name in ("two", "other"))
    visiting = create_run(tmp_path / "visiting" / "vm-2", "r", "two")
    run_id(other)
    visiting.id_file.write_text(run_id(two))
    leader = start("-m", "headway.agent", "4", "runs/two")
    logs = (two.logs / "0001-vm-0-zygote.log", visiting.logs / "0001-vm-2-zygote.log")
    nodes = [start("node.py", str(log)) for log in logs]
    far = start("node.py", str(other.logs / "0001-vm-1-zygote.log"))
    all_nodes = (*nodes, far)
    eventually(lambda: sum(len(named("hw-spare", descendants(node.pid))) for node in all_nodes) == 3)
    eventually(lambda: sum(len(named("hw two rank-0", descendants(node.pid))) for node in all_nodes) == 3)
    eventually(lambda: find(two) is not None)

    led_here, led_elsewhere = find(two), find(other)
    assert led_here is not None
    assert led_here.workers == named("hw two rank-0", [pid for node in nodes for pid in descendants(node.pid)])
    assert (led_here.agent, led_here.keeper, led_here.led_here, led_here.spares) == (leader.pid, os.getpid(), True, 2)
    assert led_elsewhere is not None
    assert led_elsewhere.workers == named("hw two rank-0", descendants(far.pid))
    assert (led_elsewhere.agent, led_elsewhere.led_here, led_elsewhere.spares) == (far.pid, False, 1)
    assert len([live for live in list_live_runs() if live.run.path.is_relative_to(tmp_path)]) == 2


def test_renamed_folder_does_not_make_two_runs_of_one(start, tmp_path: Path) -> None:
    """The agent has the name that the folder had, its zygote's log is in the folder that has another name now."""
    (tmp_path / "code" / "headway" / "agent" / "__main__.py").write_text(LEADER)
    run = create_run(tmp_path / "runs", "r", "here")
    leader = start("-m", "headway.agent", "4", "runs/here")
    eventually(lambda: len(named("hw-spare", descendants(leader.pid))) == 1)
    run.path.rename(tmp_path / "runs" / "away")
    live = [live for live in list_live_runs() if live.run.path.is_relative_to(tmp_path)]
    assert [(entry.run.name, entry.agent, entry.led_here) for entry in live] == [("here", leader.pid, True)]
