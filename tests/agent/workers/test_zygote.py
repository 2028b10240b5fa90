"""The zygote and its workers exit when the agent dies."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from eventually import CEILING_S, eventually
from headway.agent.workers.zygote import ZygoteClient

AGENT = """
import sys
from pathlib import Path
from headway.agent import new_run, supervise_run
from headway.recipe import FaultPlan, Recipe
recipe = Recipe.model_validate_json(sys.argv[1])
attempt = new_run(recipe, Path(sys.argv[2]), name="r", workers=2)
supervise_run(attempt.model_copy(update={"faults": FaultPlan().stall("compute", 2, 600)}))
"""


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_killed_agent_leaves_no_process(recipe, tmp_path: Path) -> None:
    command = [sys.executable, "-c", AGENT, recipe().model_dump_json(), str(tmp_path)]
    agent = subprocess.Popen(command, env={key: value for key, value in os.environ.items() if "ONEDNN" not in key})
    events = tmp_path / "r" / "events" / "0001-rank-0.jsonl"
    eventually(lambda: events.exists() and b'"step":1' in events.read_bytes(), poll_s=0.05)
    processes = eventually(lambda: living if len(living := descendants(agent.pid)) >= 5 else [], poll_s=0.05)
    assert len(processes) == 5, "a zygote, two workers, two spares"
    # On ARM each would leave a /tmp/perf-PID.map.
    assert {process.environ().get("ONEDNN_JIT_PROFILE") for process in processes} == {"0"}
    agent.kill()
    agent.wait()
    exited, alive = psutil.wait_procs(processes, timeout=CEILING_S)
    assert alive == []
    assert len(exited) == 5
    header = json.loads((tmp_path / "r" / "events" / "0001-agent.jsonl").read_text().splitlines()[0])
    assert header["pid"] == agent.pid


def test_zygote_survives_the_signals_of_a_batch_system_from_its_start_on(tmp_path: Path) -> None:
    """A job that is requeued gets SIGTERM in all of its processes, maybe while the zygote imports torch."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    client = ZygoteClient.start(tmp_path / "log", os.environ)
    try:
        os.kill(client.pid, signal.SIGTERM)
        os.kill(client.pid, signal.SIGUSR1)
        eventually(lambda: client.ready(0.1))
    finally:
        client.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before, "this process has its own mask again"
