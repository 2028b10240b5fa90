"""What it costs the steps that they are watched: marks, looks at the numbers, and the agent beside them.

    python benchmarks/watching.py [--out FILE] [--steps 400]

marks      the demo's decoder in one process, steps with and without marks in turn (the same hooks are there, their page
           is not written): the median difference, and beside it marks a step times what one costs
numbers    what looking at a step's loss and norm costs
agent      processor time of the agent and of its keeper in a run of two workers, as a share of one core, and what that
           is of the run's worker-seconds

The goal is 0.5 % of a step for all of it together. Differences of single steps are noise on a shared machine: medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from headway.data import BuildOptions, build_dataset
from headway.models import empty_decoder
from headway.parallel import ParallelModel, World, parallelize_model
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe import Recipe, load_recipe
from headway.recipe.schema import Health
from headway.track.heartbeat import PAGE, HeartbeatWriter
from headway.train.heartbeat_hooks import add_heartbeat_hooks
from headway.train.numerics import NumericsMonitor

ROOT = Path(__file__).resolve().parent.parent


class Mute(HeartbeatWriter):
    """A beat that can be switched off, so that the same step runs with and without marks."""

    on = True

    def mark(self, module: int = 0) -> None:
        """Make a mark if it is on."""
        if self.on:
            super().mark(module)


def spread_of(recipe: Recipe) -> ParallelModel:
    """The recipe's decoder on one process, with weights of any kind."""
    with torch.device("meta"):
        model = empty_decoder(recipe.model)
    spread = parallelize_model(model, recipe, World(rank=0, size=1, device=torch.device("cpu")))
    for parameter in spread.model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return spread


def marks(recipe: Recipe, steps: int) -> dict[str, float]:
    """Steps with and without marks, one after the other."""
    torch.set_num_threads(1)
    spread, beat = spread_of(recipe), Mute(memoryview(bytearray(PAGE)))
    add_heartbeat_hooks(spread, beat)
    rows, seq = recipe.train.batch, recipe.data.seq
    tokens = torch.randint(0, recipe.model.vocab_size, (rows, seq + 1))
    taken: dict[bool, list[float]] = {True: [], False: []}
    count = 0
    for step in range(1, 2 * steps + 1):
        beat.on = step % 2 == 0
        begun = time.perf_counter()
        if beat.on:
            beat.step(step)
            beat.ready()
        spread.passes(DeviceBatch(tokens[:, :-1], tokens[:, 1:]), SumScale.per_label(rows * seq))
        if beat.on:
            beat.enter("optimizer")
            beat.enter("record")
            count = beat._marks
        taken[beat.on].append(time.perf_counter() - begun)
        spread.model.zero_grad(set_to_none=True)
    begun = time.perf_counter()
    for _ in range(100_000):
        beat.mark(1)
    one = (time.perf_counter() - begun) / 100_000
    with_s, without_s = (statistics.median(taken[on][5:]) for on in (True, False))
    return {"with_s": with_s, "without_s": without_s, "mark_s": one, "marks": count, "share": count * one / without_s}


def numbers() -> float:
    """Seconds for one look at a step's numbers."""
    watch, loss = NumericsMonitor(Health()), torch.randn(20_000).abs().tolist()
    begun = time.perf_counter()
    for step, value in enumerate(loss, start=1):
        watch.look(step, value, 1.0)
    return (time.perf_counter() - begun) / len(loss)


def agent(folder: Path, data: Path) -> dict[str, float]:
    """Processor time of agent and keeper while a run of two workers steps."""
    words = ["train", str(ROOT / "recipes/demo.toml"), "--workers", "2", "--runs", str(folder), "--name", "watched"]
    words += ["--set", f"data.path={data}", "--set", "train.steps=100000"]
    keeper = subprocess.Popen([sys.executable, "-m", "headway.cli.main", *words], stderr=subprocess.DEVNULL)
    try:
        record = folder / "watched" / "events" / "0001-rank-0.jsonl"
        while not record.exists() or b'"step"' not in record.read_bytes():
            time.sleep(0.2)
        (process,) = psutil.Process(keeper.pid).children()
        time.sleep(2)
        before = [sum(p.cpu_times()[:2]) for p in (process, psutil.Process(keeper.pid))]
        time.sleep(20)
        after = [sum(p.cpu_times()[:2]) for p in (process, psutil.Process(keeper.pid))]
    finally:
        for _ in range(2):
            keeper.terminate()
            time.sleep(0.5)
        keeper.wait()
    agent_s, keeper_s = (b - a for a, b in zip(before, after, strict=True))
    return {"agent_core": agent_s / 20, "keeper_core": keeper_s / 20, "share": (agent_s + keeper_s) / 20 / 2}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data"
        build_dataset(data, [f"{Path(json.__file__).parent}/*.py"], BuildOptions(vocab_size=300))
        recipe = load_recipe(ROOT / "recipes/demo.toml", [f"data.path={data}", "model.vocab_size=2048"])
        result = {"marks": marks(recipe, options.steps), "look_s": numbers(), "agent": agent(folder, data)}
    told, look = result["marks"], result["look_s"]
    differs = told["with_s"] / told["without_s"] - 1
    print(f"a step without marks {told['without_s'] * 1e3:.2f} ms, with {told['with_s'] * 1e3:.2f} ms ({differs:+.2%})")
    print(f"  {told['marks']} marks of {told['mark_s'] * 1e9:.0f} ns: {told['share']:.3%} of a step")
    print(f"  a look at its numbers {look * 1e6:.1f} us: {look / told['without_s']:.3%}")
    busy = result["agent"]
    cores = f"agent {busy['agent_core']:.2%} of a core, keeper {busy['keeper_core']:.2%}"
    print(f"{cores}: {busy['share']:.3%} of two workers")
    result["all"] = told["share"] + look / told["without_s"] + busy["share"]
    print(f"all of it: {result['all']:.3%} of a step (goal 0.5 %); {os.cpu_count()} cores, torch {torch.__version__}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
