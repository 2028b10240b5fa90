"""`headway stacks` over a run whose record names real processes."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from headway.cli.stacks import stacks
from headway.errors import RunError, UsageError
from headway.track import Recorder, create_run, lock_run, record_path

WORKER = """
import sys, time
from pathlib import Path
from headway.train.stack_responder import answer_requests

class Loader:
    def read_the_next_batch_of_a_very_long_name(self):
        print("ready", flush=True); time.sleep(600)

def a():
    Loader().read_the_next_batch_of_a_very_long_name()

answer_requests(Path(sys.argv[1]), 2, int(sys.argv[2]))
a()
"""


class Live:
    """A run that this process holds, with as many workers as asked for."""

    def __init__(self, root, monkeypatch, stack):
        self.root = root
        self.run = create_run(root, "tiny", "live")
        self.processes = []
        stack.callback(self.end)
        stack.enter_context(lock_run(self.run))
        monkeypatch.setenv("PATH", "/usr/bin:/bin")

    def record(self, attempt, *events):
        path = record_path(self.run.events, attempt, "agent")
        with Recorder(path, attempt=attempt, process="agent") as recorder:
            for kind, fields in events:
                recorder.event(kind, **fields)

    def start(self, rank):
        deep = self.root / "site-packages" / "a_package_of_theirs" / "with_folders_in_folders" / "and_a_long_file_name"
        deep.mkdir(parents=True, exist_ok=True)
        (deep / "training_data_reader.py").write_text(WORKER)
        command = [sys.executable, str(deep / "training_data_reader.py"), str(self.run.stacks), str(rank)]
        self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert self.processes[-1].stdout.readline() == "ready\n"
        return self.processes[-1].pid

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def live(tmp_path, monkeypatch):
    with ExitStack() as stack:
        yield Live(tmp_path / "runs", monkeypatch, stack)


def test_each_worker_on_a_screen_of_80_columns(live, capsys):
    live.record(1, ("worker", {"rank": 0, "pid": 1}), ("exit", {"rank": 0, "code": -9}))
    pids = [live.start(0), live.start(1)]
    live.record(
        2,
        ("worker", {"rank": 0, "pid": pids[0]}),
        ("worker", {"rank": 1, "pid": 1}),
        ("exit", {"rank": 1, "code": -9}),
        ("worker", {"rank": 1, "pid": pids[1]}),
        ("worker", {"rank": 2, "pid": 1}),
        ("exit", {"rank": 2, "code": 0}),
    )
    stacks("live", runs=live.root)
    out = capsys.readouterr().out
    assert max(map(len, out.replace(str(live.root), "runs").splitlines())) <= 80
    headings = [line for line in out.splitlines() if line.startswith("rank ")]
    assert [line.split("  ")[:2] for line in headings] == [
        [f"rank {rank}", f"process {pid}"] for rank, pid in enumerate(pids)
    ]
    assert "".join(out.split()).count("training_data_reader.py:8inread_the_next_batch_of_a_very_long_name") == 2
    assert out.count("training_data_reader.py:11\n") == 2
    assert out.count("the flight recorder is empty") == 1, "what all lack is said once"
    assert str(live.run.stacks / "0002-1.txt") in out
    assert out.splitlines()[-1] == f"next: headway logs live --runs {live.root}"


def test_as_json_and_one_rank_alone(live, capsys):
    pids = [live.start(0), live.start(1)]
    live.record(2, *(("worker", {"rank": rank, "pid": pid}) for rank, pid in enumerate(pids)))
    stacks("live", rank=1, runs=live.root, json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["attempt"], told["path"]) == ("live", 2, str(live.run.stacks / "0002-1.txt"))
    (rank,) = told["ranks"]
    assert (rank["rank"], rank["pid"], rank["collectives"]) == (1, pids[1], None)
    assert rank["frames"][0]["function"] == "read_the_next_batch_of_a_very_long_name"
    assert rank["line"].endswith("training_data_reader.py:8 in read_the_next_batch_of_a_very_long_name")


def test_missing_ranks_are_errors(live):
    with pytest.raises(RunError, match="no workers right now"):
        stacks("live", runs=live.root)
    live.record(2, ("worker", {"rank": 3, "pid": os.getpid()}))
    with pytest.raises(UsageError, match="no worker 1") as caught:
        stacks("live", rank=1, runs=live.root)
    assert caught.value.hint == "its workers: 3"


def test_ended_run_and_run_on_another_host_are_errors(live, tmp_path, monkeypatch):
    over = create_run(live.root, "tiny", "over")
    with pytest.raises(RunError, match="over is not running"):
        stacks("over", runs=live.root)
    over.stacks.mkdir()
    (over.stacks / "0001-1.txt").write_text("")
    with pytest.raises(RunError) as caught:
        stacks("over", runs=live.root)
    assert str(over.stacks) in caught.value.hint
    monkeypatch.setattr(socket, "gethostname", lambda: "far-away")
    live.record(1, ("worker", {"rank": 0, "pid": os.getpid()}))
    monkeypatch.undo()
    with pytest.raises(RunError, match="live is on far-away"):
        stacks("live", runs=live.root)
