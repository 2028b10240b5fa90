"""A machine is lost: how long until the run steps again, beside torchrun.

    python benchmarks/lost_node.py [--rounds 3] [--json FILE]

Two nodes with a worker each, all of them processes of this machine; one of them, which does not lead, is ended as a
whole in the middle of a run, agent and worker in one instant. Told is the time from there to the end of the first step
that is made again. Headway replaces the node by a spare, or goes on with one worker. torchrun (`--nnodes 2:2` and a
third agent that waits, or `1:2`) runs the same model, data and update, and goes on from a checkpoint that
torch.distributed.checkpoint wrote. Ways take turns, torchrun in the first rounds only; a try that does not come to step
again within two minutes is told as such.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from headway.recipe.load import load_recipe
from headway.track import Record, RunFolder, read_run

AT = 25
"""The step after which a node is lost."""
PATIENCE_S = 120
RECIPE = """name = "lost"
[data]
path = "data"
seq = 64
[model]
layers = 2
dim = 64
heads = 2
vocab_size = 2048
[train]
steps = 1000000
batch = 4
warmup_steps = 5
[checkpoint]
every_steps = 20
memory_every_steps = 1
"""


def main() -> None:
    """All ways, some rounds, a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ways: dict[str, Callable[[Path], float]] = {
        "headway, a spare": lambda folder: headway(folder, spares=1),
        "torchrun, a spare": lambda folder: torchrun(folder, agents=3, nodes="2:2"),
        "headway, one node less": lambda folder: headway(folder, spares=0),
        "torchrun, one node less": lambda folder: torchrun(folder, agents=2, nodes="1:2"),
    }
    folder = Path(tempfile.mkdtemp())
    found: dict[str, list[float]] = {way: [] for way in ways}
    try:
        command(folder, "data", "build", "data", f"{sysconfig.get_path('stdlib')}/*.py", "--vocab-size", "2048")
        (folder / "r.toml").write_text(RECIPE)
        for number in range(options.rounds):
            for way, measured in ways.items():
                if way.startswith("torchrun") and number >= options.peer_rounds:
                    continue
                (one := folder / f"{number}-{way.replace(', ', '-').replace(' ', '-')}").mkdir()
                found[way].append(measured(one))
                print(f"{way:26}{seconds(found[way][-1]):>10}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("seconds from the loss to the end of the next step, medians")
    for way, times in found.items():
        told = f"   ({seconds(min(times))} to {seconds(max(times))})" if len(times) > 1 else ""
        print(f"  {way:26}{seconds(statistics.median(times)):>10}{told}")
    if options.json:
        told = {way: [one if math.isfinite(one) else None for one in times] for way, times in found.items()}
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "seconds": told}, indent=1) + "\n")


def seconds(value: float) -> str:
    """For people."""
    return f"{value:.2f}" if math.isfinite(value) else f"over {PATIENCE_S}"


def command(folder: Path, *words: str) -> None:
    """A verb of Headway's, to its end."""
    subprocess.run([sys.executable, "-m", "headway.cli.main", *words], cwd=folder, check=True, stdout=2)


@contextlib.contextmanager
def started(folder: Path, words: list[str], **variables: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that is gone afterwards, with all that it started."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env=os.environ | variables)
    try:
        yield process
    finally:
        end([process.pid])
        process.wait()


def end(pids: list[int]) -> None:
    """Processes and all that they started, in one instant."""
    found = list[psutil.Process]()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [one := psutil.Process(pid), *one.children(recursive=True)]
    for deed in (psutil.Process.suspend, psutil.Process.kill):
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                deed(process)


def until(is_true: Callable[[], object]) -> bool:
    """Wait for something, and tell whether it came."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := is_true()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(found)


def headway(folder: Path, spares: int) -> float:
    """One run of `headway train --nodes 2`."""
    words = ["train", "../r.toml", "--name", "r", "--workers", "2", "--nodes", "2", "--spares", str(spares)]
    words += ["--set", "data.path=../data"]
    run = RunFolder(folder / "runs" / "r")

    def steps() -> list[tuple[int, int]]:
        """Of each attempt's first worker, when each step ended, and its number."""
        records = read_run(run, "rank-0") if run.events.is_dir() else []
        return [one for record in records for one in steps_of(record)]

    with started(folder, [sys.executable, "-m", "headway.cli.main", *words], OMP_NUM_THREADS="1") as process:
        until(lambda: any(number >= AT for _, number in steps()))
        (node,) = [one.pid for one in psutil.Process(process.pid).children(recursive=True) if is_node(one, "n1")]
        end([node])
        lost = time.monotonic_ns()
        if not until(lambda: any(steps_of(record) for record in read_run(run, "rank-0")[1:])):
            return math.inf
        return (steps_of(read_run(run, "rank-0")[-1])[0][0] - lost) / 1e9


def steps_of(record: Record) -> list[tuple[int, int]]:
    """When each step of a record ended."""
    return [(record.header.mono + event["t"], event["step"]) for event in record.events if event["kind"] == "step"]


def is_node(process: psutil.Process, name: str) -> bool:
    """Whether a process is the agent of a node."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "headway.agent.nodes.node_agent" in words and words[words.index("--name") + 1] == name


def torchrun(folder: Path, agents: int, nodes: str) -> float:
    """One run of the same loop below torchrun."""
    recipe = load_recipe(folder.parent / "r.toml")
    data = recipe.data.model_copy(update={"path": str(folder.parent / "data")})
    (folder / "recipe.json").write_text(recipe.model_copy(update={"data": data}).model_dump_json())
    (folder / "faults.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"]
    words += ["--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    words += ["--rdzv-id", "lost", "--local-addr", "127.0.0.1"]
    words += ["-m", "headway.train.torchrun_baseline", str(folder)]

    def notes() -> list[dict]:
        found = [json.loads(line) for path in folder.glob("rank-0.jsonl") for line in path.read_text().splitlines()
                 if line.endswith("}")]  # fmt: skip
        return [one for one in found if one["kind"] == "step"]

    with contextlib.ExitStack() as stack:
        started_ones = list["subprocess.Popen[bytes]"]()
        for number in range(agents):
            started_ones.append(stack.enter_context(started(folder, words, OMP_NUM_THREADS="1")))
            if not number:
                time.sleep(2.0)  # it has the store that the others ask
        until(lambda: any(one["step"] >= AT for one in notes()))
        busy = [one for one in started_ones[1:] if len(psutil.Process(one.pid).children(recursive=True)) > 0]
        end([busy[0].pid])
        lost = time.monotonic_ns()
        if not until(lambda: any(one["at_ns"] > lost + 5e8 for one in notes())):
            return math.inf
        return (next(one["at_ns"] for one in notes() if one["at_ns"] > lost + 5e8) - lost) / 1e9


if __name__ == "__main__":
    main()
