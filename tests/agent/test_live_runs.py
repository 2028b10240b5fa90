"""Who works for a run on this machine, by its processes: real ones, that only look like agents."""

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
    """Starts `python WORDS` with agents and zygotes that do nothing; all of them end with the test."""
    for name, text in {"agent/__main__.py": SLEEP, "train/zygote.py": ZYGOTE}.items():
        path = tmp_path / "code" / "headway" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    (tmp_path / "code" / "headway" / "__init__.py").touch()
    (tmp_path / "node.py").write_text(NODE)
    started = list["subprocess.Popen[bytes]"]()

    def begin(*words: str) -> "subprocess.Popen[bytes]":
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "code")}
        started.append(
            subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment, start_new_session=True)
        )
        return started[-1]

    yield begin
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()


def of(run: RunFolder) -> LiveRun | None:
    return next((one for one in list_live_runs() if one.run.path == run.path), None)


def below(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*found, *(deeper for child in found for deeper in below(child))]


def called(name: str, pids: list[int]) -> tuple[int, ...]:
    return tuple(sorted(pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == name))


def test_agents_of_all_nodes_that_are_here_count(start, tmp_path: Path) -> None:
    two, other = (create_run(tmp_path / "runs", "r", name) for name in ("two", "other"))
    visiting = create_run(tmp_path / "visiting" / "vm-2", "r", "two")
    run_id(other)
    visiting.id_file.write_text(run_id(two))
    leader = start("-m", "headway.agent", "4", "runs/two")
    logs = (two.logs / "0001-vm-0-zygote.log", visiting.logs / "0001-vm-2-zygote.log")
    nodes = [start("node.py", str(log)) for log in logs]
    far = start("node.py", str(other.logs / "0001-vm-1-zygote.log"))
    everybody = (*nodes, far)
    eventually(lambda: sum(len(called("hw-spare", below(node.pid))) for node in everybody) == 3)
    eventually(lambda: sum(len(called("hw two rank-0", below(node.pid))) for node in everybody) == 3)
    eventually(lambda: of(two) is not None)

    found, led_elsewhere = of(two), of(other)
    assert found is not None
    assert found.workers == called("hw two rank-0", [pid for node in nodes for pid in below(node.pid)])
    assert (found.agent, found.keeper, found.led_here, found.spares) == (leader.pid, os.getpid(), True, 2)
    assert led_elsewhere is not None
    assert led_elsewhere.workers == called("hw two rank-0", below(far.pid))
    assert (led_elsewhere.agent, led_elsewhere.led_here, led_elsewhere.spares) == (far.pid, False, 1)
    assert len([one for one in list_live_runs() if one.run.path.is_relative_to(tmp_path)]) == 2
