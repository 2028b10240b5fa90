"""Stack dumps of real processes that sleep, spin, hold the GIL, are stopped, or die."""

import faulthandler
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from eventually import CEILING_S, eventually
from headway.agent.supervise import py_spy, stack_queries, worker_stacks
from headway.agent.supervise.stack_dumps import collect
from headway.agent.supervise.worker_stacks import Frame, WorkerStack, describe_collective, describe_location, short_path
from headway.track.process_state import process_state

ANSWERS_S = 60.0
"""Timeout for workers that can answer."""
SIGNALLED_S = 2.0
"""Half of it for the responder, half for the signal handler."""
WORKER = """
import itertools, os, re, sys, threading, time
from pathlib import Path
from headway.train.stack_responder import answer_requests

written = []
ENDLESS = re.compile("(a+)+$")

def nap():
    written.append(os.write(1, b"ready\\n")); time.sleep(600)  # sleeps here

def outer():
    nap()  # naps here

def spin():
    for _ in itertools.chain([os.write(1, b"ready\\n")], itertools.repeat(None)):
        sum([1, 2, 3])  # spins here

def hold_gil():
    "A regular expression that runs forever and holds the GIL."
    os.write(1, b"ready\\n"); ENDLESS.match("a" * 60 + "b")  # holds here

def deep(calls):
    deep(calls - 1) if calls else nap()

def deeper():
    deep(300)

def mute():
    nap()

if sys.argv[1] != "mute":
    answer_requests(Path(sys.argv[2]), 1, int(sys.argv[3]))
threading.Thread(target=nap, name="helper", daemon=True).start()
while not written:
    time.sleep(0.01)
globals()[sys.argv[1]]()
"""


def line_of(mark: str) -> int:
    return next(number for number, line in enumerate(WORKER.splitlines(), start=1) if line.endswith(f"# {mark}"))


def cpu_s(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


class Workers:
    """Processes that run the function they are named after."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "stacks"
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *functions: str) -> dict[int, int]:
        """Start one process per function name, in rank order; all are inside it when this returns."""
        for rank, function in enumerate(functions):
            command = [sys.executable, str(self.script), function, str(self.folder), str(rank)]
            self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for process, function in zip(self.processes, functions, strict=True):
            assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2  # one line per thread
            if function == "hold_gil":
                used = cpu_s(process.pid)
                eventually(lambda pid=process.pid, before=used: cpu_s(pid) > before + 0.02)
            elif function != "spin":
                eventually(lambda pid=process.pid: process_state(pid) == "S")
        return {rank: process.pid for rank, process in enumerate(self.processes)}

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def workers(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # hide any installed py-spy
    monkeypatch.setattr(py_spy, "sys", SimpleNamespace(executable=str(tmp_path / "python")))
    started = Workers(tmp_path)
    yield started
    started.end()


def test_sleeping_worker_shows_its_line(workers):
    pids = workers.start("outer")
    (stack,) = collect(pids, workers.folder, 1, ANSWERS_S).workers
    assert (stack.rank, stack.pid, stack.state, stack.threads) == (0, pids[0], "S", 3)
    assert [(frame.function, frame.line) for frame in stack.frames[:2]] == [
        ("nap", line_of("sleeps here")),
        ("outer", line_of("naps here")),
    ]
    assert {frame.file for frame in stack.frames} == {str(workers.script)}
    assert describe_location(stack) == f"{workers.script}:{line_of('sleeps here')} in nap"
    assert "no collectives: the flight recorder is empty: torch.distributed is not imported" in stack.missing


def test_each_dump_is_written_to_a_new_file(workers):
    pids = workers.start("outer")
    first, second = (collect(pids, workers.folder, 1, ANSWERS_S).path for _ in range(2))
    assert (first.name, second.name) == ("0001-1.txt", "0001-2.txt")
    text = first.read_text()
    assert f"rank 0, process {pids[0]}: sleeping" in text
    assert "helper" in text, "all threads are listed by name"
    assert text.count(f'"{workers.script}", line {line_of("sleeps here")} in nap') == 2
    assert collect({}, workers.folder, 1).workers == []


def test_worker_that_can_answer_is_never_signalled(workers):
    """The signal handler walks stacks that may change meanwhile, which sometimes crashes the process."""
    pids = workers.start("spin")
    before = (workers.folder / "0001-rank-0.txt").read_bytes()
    for _ in range(10):
        (stack,) = collect(pids, workers.folder, 1, ANSWERS_S).workers
        assert stack.frames[0].function == "spin"
        assert stack.frames[0].line in (line_of("spins here") - 1, line_of("spins here"))
    assert (workers.folder / "0001-rank-0.txt").read_bytes() == before
    assert workers.processes[0].poll() is None


def test_worker_that_holds_the_gil_answers_by_signal(workers):
    pids = workers.start("hold_gil")
    for _ in range(2):  # the newest answer counts
        (stack,) = collect(pids, workers.folder, 1, SIGNALLED_S).workers
        assert stack.state == "R"
        assert (stack.frames[0].function, stack.frames[0].line) == ("hold_gil", line_of("holds here"))
        assert "no collectives: native code holds the worker's GIL" in stack.missing
    assert workers.processes[0].poll() is None


def test_truncated_stack_counts_as_an_answer(workers):
    pids = workers.start("deeper")
    (stack,) = collect(pids, workers.folder, 1, ANSWERS_S).workers
    functions = [frame.function for frame in stack.frames]
    assert functions == ["nap", *["deep"] * 99], "as many as faulthandler shows"


def test_workers_that_cannot_answer_do_not_affect_others(workers):
    pids = workers.start("outer", "hold_gil", "outer", "mute")
    os.kill(pids[2], signal.SIGSTOP)
    eventually(lambda: process_state(pids[2]) == "T")
    sleeping, holding, stopped, mute = collect(pids, workers.folder, 1, SIGNALLED_S).workers
    assert (sleeping.frames[0].function, holding.frames[0].function) == ("nap", "hold_gil")
    assert (stopped.state, stopped.frames) == ("T", ())
    assert "no Python stack: the process is stopped and handles no signal" in stopped.missing
    assert "no collectives: the process is stopped and handles no signal" in stopped.missing
    assert "no Python stack: the process has not started its responder yet" in mute.missing
    os.kill(pids[2], signal.SIGCONT)
    (continued,) = collect({2: pids[2]}, workers.folder, 1, ANSWERS_S).workers
    assert continued.frames[0].function == "nap"
    assert [process.poll() for process in workers.processes] == [None] * 4, "a query ends no process"
    assert "most recent call first" not in (workers.folder / "0001-rank-2.txt").read_text().partition("listen\n")[2]


def test_worker_that_dies_during_the_query_and_one_that_exited_before(workers, monkeypatch):
    pids = workers.start("hold_gil", "outer")
    workers.processes[1].kill()
    workers.processes[1].wait()
    wait = stack_queries._wait

    def kill_then_wait(*waiting) -> None:
        os.kill(pids[0], signal.SIGKILL)
        wait(*waiting)

    monkeypatch.setattr(stack_queries, "_wait", kill_then_wait)
    killed, gone = collect(pids, workers.folder, 1, ANSWERS_S).workers
    assert (killed.state, gone.state) == ("Z", "gone")
    assert describe_location(gone) == ""
    for stack in (killed, gone):
        assert "no Python stack: the process has exited" in stack.missing


def test_restarted_rank_is_queried_through_its_own_pipe(workers):
    workers.start("outer")
    workers.end()
    workers.processes.clear()
    pids = workers.start("outer")
    (stack,) = collect(pids, workers.folder, 1, ANSWERS_S).workers
    assert stack.frames[0].function == "nap"


def test_unwritable_folder(tmp_path, workers, capsys):
    from headway.train.stack_responder import answer_requests

    (tmp_path / "file").write_text("")
    taken = collect(workers.start("mute"), tmp_path / "file" / "stacks", 1)
    assert (taken.path, len(taken.workers)) == (None, 1)
    answer_requests(tmp_path / "file" / "stacks", 1, 0)
    assert "cannot write stack dumps" in capsys.readouterr().err


# -- what faulthandler writes


def test_frames_equal_those_of_traceback(tmp_path):
    """traceback walks the frames another way."""
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=False)
        truth = traceback.extract_stack()
    frames = stack_queries.main_frames((tmp_path / "dump").read_text())
    want = [Frame(frame.name, frame.filename, frame.lineno) for frame in reversed(truth)]
    assert frames[1:] == tuple(want[1 : len(frames)])
    assert (frames[0].function, frames[0].file) == (want[0].function, want[0].file)
    assert len(frames) == min(100, len(want))


def test_main_thread_is_found_among_all_threads():
    """Also with thread names, as newer Pythons write them, and with confusing file names."""
    text = (
        "main thread 0x00000000000000aa of 0x00000000000000aa MainThread, 0x00000000000000bb x\n"
        "Current thread 0x00000000000000bb [x] (most recent call first):\n"
        '  File "/a/other.py", line 3 in run\n'
        "\n"
        "Thread 0x00000000000000aa [MainThread] (most recent call first):\n"
        '  File "/a/odd", line 7 in name.py", line 12 in inner\n'
        '  File "/a/b.py", line ??? in <module>\n'
        "  ...\n"
    )
    want = (Frame("inner", '/a/odd", line 7 in name.py', 12), Frame("<module>", "/a/b.py", 0))
    assert stack_queries.main_frames(text) == want
    assert stack_queries.main_frames("") == ()


# -- descriptions

PYTHON, TORCH, OWN = (
    Frame("wait", "/usr/lib/python3.11/threading.py", 327),
    Frame("recv", "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2511),
    Frame("read", "/home/me/headway/src/headway/data/loader.py", 88),
)
COMPILED = Frame("call", "/tmp/torchinductor_me/ab/cabc.py", 9)
INSTALLED = Frame("_carry_out", "/v/lib/python3.12/site-packages/headway/train/inject.py", 40)
FROZEN = Frame("_find_and_load", "<frozen importlib._bootstrap>", 1176)
IN_A_VENV_IN_SRC = Frame("f", "/src/x/.venv/lib64/python3.13/site-packages/numpy/core.py", 1)


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        ((), ""),
        ((OWN,), "headway/data/loader.py:88 in read"),
        ((OWN, INSTALLED), "headway/data/loader.py:88 in read"),
        (
            (TORCH, PYTHON, INSTALLED, OWN),
            "in recv, torch/distributed/distributed_c10d.py:2511, called from headway/train/inject.py:40 in _carry_out",
        ),
        ((PYTHON, OWN), "in wait, threading.py:327, called from headway/data/loader.py:88 in read"),
        (
            (COMPILED, TORCH, OWN),
            "in call, /tmp/torchinductor_me/ab/cabc.py:9, called from headway/data/loader.py:88 in read",
        ),
        ((FROZEN, PYTHON), "in _find_and_load, <frozen importlib._bootstrap>:1176"),
        ((IN_A_VENV_IN_SRC, OWN), "numpy/core.py:1 in f"),
    ],
)
def test_describe_location(frames, line):
    assert describe_location(WorkerStack(0, 1, "S", frames=frames)) == line


def test_paths_outside_packages_are_not_shortened():
    assert short_path("/home/me/model.py") == "/home/me/model.py"


def entry(number, at, **fields):
    fields_of_gloo = {
        "profiling_name": "gloo:all_reduce",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
    }
    return fields_of_gloo | {"process_group": ["0", "all"], "state": "scheduled", "time_created_ns": at} | fields


@pytest.mark.parametrize(
    ("entries", "completed", "line"),
    [
        ([entry(1, 10, retired=True)], "1", "gloo:all_reduce, number 1 of group 0 all, ended"),
        ([entry(2, 20), entry(1, 10, retired=True)], "1", "gloo:all_reduce, number 2 of group 0 all, not ended"),
        (
            [entry(2, 20), entry(3, 30), entry(4, 40, retired=True)],
            "1",
            "gloo:all_reduce, number 2 of group 0 all, not ended",
        ),
        ([entry(2, 20)], "2", "gloo:all_reduce, number 2 of group 0 all, ended"),
        ([entry(2, 20, state="completed")], "1", "gloo:all_reduce, number 2 of group 0 all, ended"),
        (
            [entry(0, 20, is_p2p=True, p2p_seq_id=5, profiling_name="nccl:recv 0<-1")],
            "9",
            "nccl:recv 0<-1, number 5 of group 0 all, not ended",
        ),
    ],
)
def test_describe_collective(entries, completed, line):
    dumps = {"fr": {"entries": entries, "pg_status": {"0": {"last_completed_collective": completed}}}}
    assert describe_collective(WorkerStack(0, 1, "S", collectives=dumps)) == line


def test_long_queue_keeps_the_last_entries_and_the_oldest_pending():
    entries = [entry(number, number, retired=number < 50) for number in range(1, 2001)]
    dumps = {"nccl": {"entries": entries, "pg_status": {"0": {"last_completed_collective": "49"}}}, "fr": {}}
    recorded, why = worker_stacks.last_collectives(dumps)
    assert [each["collective_seq_id"] for each in recorded["nccl"]["entries"]] == [50, *range(1969, 2001)]
    assert (list(recorded), why) == (["nccl"], "")


# -- py-spy

DUMP = """Process 7: python x.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 8 (idle): "helper"
    Thread.run (/usr/lib/python3.11/threading.py:982)
Thread 7 (idle): "MainThread"
    nap (/home/me/odd (1).py:7)
    <module> (/home/me/x.py:9)
"""
REFUSES = 'echo "Can\'t get native stack traces" >&2; exit 1'


def fake_py_spy(folder: Path, monkeypatch: pytest.MonkeyPatch, plain: str, native: str) -> None:
    """Put a py-spy on PATH that runs `plain` for Python stacks and `native` for native ones."""
    (folder / "dump").write_text(DUMP)
    (folder / "bin").mkdir()
    script = folder / "bin" / "py-spy"
    script.write_text(
        f'#!/bin/sh\ncd {folder}\ncase "$*" in *--native*--nonblocking*|*--nonblocking*--native*) exit 9;;\n'
        f"*--native*) {native};;\n*) {plain};; esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(py_spy, "PY_SPY_TIMEOUT_S", 0.5 if "sleep" in native else ANSWERS_S)


@pytest.mark.parametrize(
    ("plain", "native", "missing"),
    [
        ("cat dump", "cat dump", None),
        ("cat dump", REFUSES, "no native stack: py-spy failed: Can't get native stack traces"),
        ("cat dump", "exec sleep 600", "no native stack: py-spy did not finish within 0.5 s"),
        ("echo Error: Permission Denied >&2; exit 1", "exit 1", "no native stack: py-spy has no permission: "),
    ],
    ids=["all", "no-native", "hangs", "forbidden"],
)
def test_py_spy_adds_stacks_or_a_reason(workers, monkeypatch, plain, native, missing):
    pids = workers.start("mute")
    fake_py_spy(workers.script.parent, monkeypatch, plain, native)
    (stack,) = collect(pids, workers.folder, 1).workers
    reasons = [line for line in stack.missing if "native" in line]
    assert [line.startswith(missing) for line in reasons] == [True] if missing else reasons == []
    if plain == "cat dump":
        assert stack.native == DUMP
        assert stack.frames == (Frame("nap", "/home/me/odd (1).py", 7), Frame("<module>", "/home/me/x.py", 9))


def test_stopped_worker_is_dumped_by_py_spy_if_installed(workers, monkeypatch):
    """With the real py-spy if installed; without it, the reason says so."""
    monkeypatch.undo()
    pids = workers.start("outer")
    os.kill(pids[0], signal.SIGSTOP)
    eventually(lambda: process_state(pids[0]) == "T")
    (stack,) = collect(pids, workers.folder, 1).workers
    reasons = [line for line in stack.missing if line.startswith("no native stack: ")]
    assert len(reasons) == 1
    if stack.native:
        assert [(frame.function, frame.line) for frame in stack.frames[:1]] == [("nap", line_of("sleeps here"))]
    else:
        assert "py-spy" in reasons[0]


# -- the flight recorder

RANKS = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from headway.train.stack_responder import answer_requests

folder = Path(sys.argv[1])

def rank(number):
    answer_requests(folder / "stacks", 1, number)
    if number < 2:
        store = dist.FileStore(str(folder / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=300))
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
    (folder / f"ready-{number}").touch()
    if number == 1:
        stall()
    together = torch.ones(2)
    if number < 2:
        dist.all_reduce(together)  # waits here
    (folder / f"sum-{number}").write_text(str(together.tolist()))
    time.sleep(600 if number == 2 else 0)

def stall():
    while not (folder / "go").exists():
        time.sleep(0.02)

children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        rank(number)
        os._exit(0)
    children.append(child)
(folder / "pids.part").write_text(" ".join(map(str, children)))
(folder / "pids.part").rename(folder / "pids")
for child in children:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_collective_of_each_rank(tmp_path):
    """Rank 0 waits in the fourth, rank 1 has not started it, rank 2 never had one; then all continue undisturbed."""
    (tmp_path / "ranks.py").write_text(RANKS)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(tmp_path / "ranks.py"), str(tmp_path)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        files = [tmp_path / "pids", *(tmp_path / f"ready-{rank}" for rank in range(3))]
        eventually(lambda: all(file.exists() for file in files))
        pids = dict(enumerate(map(int, (tmp_path / "pids").read_text().split())))
        waiting = "gloo:all_reduce, number 4 of group 0 default_pg, not ended"

        def rank_0_waits() -> list[WorkerStack]:
            dumped = collect(pids, tmp_path / "stacks", 1, ANSWERS_S, native=False).workers
            return dumped if describe_collective(dumped[0]) == waiting else []

        waits, stalls, alone = eventually(rank_0_waits)
        assert describe_collective(stalls).startswith("gloo:all_reduce, number 3 of group 0 default_pg, ")
        assert waits.collectives["fr"]["pg_status"]["0"]["last_enqueued_collective"] == "4"
        assert alone.collectives is None
        assert any("no collectives: the flight recorder is empty: no collective" in line for line in alone.missing)
        mark = next(n for n, line in enumerate(RANKS.splitlines(), start=1) if line.endswith("# waits here"))
        assert describe_location(waits).startswith("in all_reduce, torch/distributed/distributed_c10d.py:")
        assert describe_location(waits).endswith(f", called from {tmp_path / 'ranks.py'}:{mark} in rank")
        (tmp_path / "go").touch()
        assert [process.stdout.readline() for _ in range(2)] == ["0\n"] * 2
        assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["[2.0, 2.0]"] * 2
    finally:
        for pid in map(int, (tmp_path / "pids").read_text().split()) if (tmp_path / "pids").exists() else ():
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        process.wait(CEILING_S)
        process.stdout.close()
