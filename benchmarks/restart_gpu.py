"""A worker that is killed on a GPU, and how long it takes until the run steps again: what of it is the device's doing.

    python benchmarks/restart_gpu.py [--kills 5] [--json FILE] [--small]

A real `headway train` of a 1B decoder (Llama-3.2-1B's shape, float32 state of 15 GB) on one GPU, with the state of
every few steps in the agent's memory. Its worker kills itself at chosen steps; each time the run goes on from memory.
Told apart, from its own record: until the agent has noticed and another process has begun, the device's context, the
model, the state's way from the host's memory to the device, page-locking the memory it saves into, and the first step.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from headway.recipe import FaultPlan
from headway.recipe.faults import read_fired_faults
from headway.track import Record, RunFolder, read_run

ONE = {
    "layers": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "vocab_size": 128256, "tie_embeddings": True,
}  # fmt: skip
SMALL = {"layers": 2, "dim": 64, "heads": 2, "vocab_size": 2048}
PARTS = ("process", "context", "model", "restore", "buffers", "first step", "all")


def headway(*words: str, folder: Path, faults: FaultPlan | None = None) -> None:
    """A command, with faults on purpose."""
    environment = os.environ | ({"HEADWAY_FAULTS": faults.model_dump_json()} if faults else {})
    subprocess.run([sys.executable, "-m", "headway.cli.main", *words], cwd=folder, check=True, env=environment)


def train(folder: Path, shape: dict, kills: int, small: bool) -> RunFolder:
    """The run, killed every ten steps."""
    headway("data", "build", "data", f"{sysconfig.get_path('stdlib')}/*.py", "--vocab-size", "2048", folder=folder)
    (folder / "r.toml").write_text('name = "gpu"\n[data]\npath = "data"\n')
    settings = {f"model.{key}": str(value).lower() for key, value in shape.items()}
    settings |= {"train.batch": 4, "train.steps": 10 * kills + 10, "train.warmup_steps": 5, "data.seq": 64}
    if not small:
        settings |= {"train.dtype": "bfloat16", "data.seq": 2048}
    settings |= {"checkpoint.every_steps": 0, "checkpoint.memory_every_steps": 5}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    plan = FaultPlan()
    for number in range(1, kills + 1):
        plan = plan.kill(step=10 * number, rank=0, attempt=None)
    headway("train", "r.toml", "--name", "r", "--workers", "1", *words, folder=folder, faults=plan)
    return RunFolder(folder / "runs" / "r")


def laps(record: Record, struck_ns: int) -> dict[str, float]:
    """Where the time went from a kill to the end of the first step of the attempt that follows, in seconds."""
    spans, open_ = dict[str, float](), dict[str, int]()
    first_step = next(event for event in record.events if event["kind"] == "step")
    for event in record.events:
        if event["kind"] == "begin":
            open_[event["name"]] = event["t"]
        elif event["kind"] == "end-span" and event["name"] not in spans:
            spans[event["name"]] = (event["t"] - open_[event["name"]]) / 1e9
    begun, zero = open_["startup"], record.header.mono
    startup = spans["startup"]
    told = {name: spans.get(name, 0.0) for name in ("context", "restore", "buffers")}
    return {
        "process": (zero - struck_ns) / 1e9,
        **told,
        "model": startup + begun / 1e9 - sum(told.values()),
        "first step": (first_step["t"] - begun) / 1e9 - startup,
        "all": (zero + first_step["t"] - struck_ns) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try this on any machine")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        run = train(folder, SMALL if options.small else ONE, options.kills, options.small)
        workers = {record.header.attempt: record for record in read_run(run, "rank-0")}
        found = [laps(workers[number + 2], one.at_ns) for number, one in enumerate(read_fired_faults(run.faults))]
        state = next(e["bytes"] for r in read_run(run, "agent") for e in r.events if e["kind"] == "memory")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(found)} kills, each followed by a restart from memory ({state / 1e9:.1f} GB held); seconds, median")
    result = {"kills": len(found), "host_bytes": state, "laps": found, "median": {}}
    for name in PARTS:
        result["median"][name] = statistics.median(lap[name] for lap in found)
        least, most = min(lap[name] for lap in found), max(lap[name] for lap in found)
        print(f"  {name:12} {result['median'][name]:7.3f}   ({least:.3f} to {most:.3f})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
