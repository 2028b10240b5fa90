"""Processes that end with the one that started them."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from eventually import eventually

CHILD = """
import json, os, signal, sys
from headway.state.parent_process import end_with_parent
end_with_parent(signal.SIGTERM, *map(int, sys.argv[1:]))
print(json.dumps({"pid": os.getpid()}), flush=True)
signal.pause()
"""
LAUNCHER = """
from headway.cli.model_process import model_process
with model_process("waiting_model", "waiting", {}, start_new_session=True) as running:
    for message in running.messages():
        print(message["pid"], flush=True)
"""


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_model_process_ends_when_its_command_is_killed(tmp_path: Path) -> None:
    """A server that is left behind would keep its port and its memory."""
    (tmp_path / "waiting_model.py").write_text(CHILD)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert not ended(pid)
        launcher.kill()
    eventually(lambda: ended(pid))


def test_process_whose_parent_has_ended_already_ends() -> None:
    result = subprocess.run([sys.executable, "-c", CHILD, "1"], stdout=subprocess.PIPE)
    assert (result.returncode, result.stdout) == (1, b"")
