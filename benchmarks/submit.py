"""From submitting a run to its first agent's start: beside what the engine takes for the same by itself.

    python benchmarks/submit.py [--out FILE] [--repeat 7] [--engines local,slurm,ray]

verb       `headway submit` as it is typed, a process from its start: recipe, data, plan, run's folder, then the engine
call       the engine's own part of it, in a process that has everything imported
bare       the same trivial script by itself: `sbatch` of a script that has `srun` start it; a placement group, a task
           in it, by a process from its start (beside the verb) or one that is connected (beside the call); a process
imports    a process that imports what the verb imports, and does nothing: the least that the verb can take

All end when the script runs, which then writes the time down: for the verb where its agent would be started. They
take turns, so that whatever else the machine does is shared; figures are medians. The goal is under 1 s above bare.
Slurm and Ray are real ones, started here on loopback as the tests do; Ray is left out where it is not installed.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.cluster.engines.engine import Engine, LaunchRequest
from headway.cluster.engines.settings import open_engine
from headway.data import BuildOptions, build_dataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "cluster" / "engines"))
PATIENCE_S = 60.0
GOAL_S = 1.0
MARK = "date +%s.%N >{file}.partial && mv {file}.partial {file}"
RAY_TASK = """
import os, subprocess, sys
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

def run(words):
    return subprocess.call(words)

def once(words):
    group = placement_group([{"CPU": 1}], strategy="STRICT_SPREAD")
    place = PlacementGroupSchedulingStrategy(group, 0)
    ray.get(ray.remote(run).options(num_cpus=1, scheduling_strategy=place).remote(words))
    remove_placement_group(group)

if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
    once(sys.argv[2:])
"""


@dataclass
class Bench:
    """Where things lie, and what is submitted."""

    folder: Path
    number: int = 0

    def mark(self) -> tuple[Path, str]:
        """A file that will say when, and the line for a shell that writes it."""
        self.number += 1
        file = self.folder / f"mark-{self.number}"
        return file, MARK.format(file=file)

    def script(self, line: str) -> str:
        path = self.folder / f"script-{self.number}.sh"
        path.write_text(f"#!/bin/bash\n{line}\n")
        return str(path)


def took(file: Path, began: float) -> float:
    """Seconds from then until the script wrote its time down."""
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{file.name} was never written")
        time.sleep(0.005)
    return float(file.read_text()) - began


def verb(bench: Bench, engine: str) -> float:
    """`headway submit`, until where the agent would start."""
    file, line = bench.mark()
    settings = [f"[{engine}]", f"setup = [{json.dumps(line)}, 'exit 0']"]
    (bench.folder / "engines.toml").write_text("\n".join(settings) + "\n")
    words = ["submit", str(bench.folder / "demo.toml"), "--on", "cpux1", "--engine", engine, "--runs"]
    environment = os.environ | {"HEADWAY_ENGINES": str(bench.folder / "engines.toml")}
    began = time.time()
    subprocess.run(
        [sys.executable, "-m", "headway.cli.main", *words, str(bench.folder / "runs")],
        env=environment, stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return took(file, began)


def imports() -> float:
    """A process that imports what `headway submit` imports, and ends."""
    began = time.time()
    words = "import headway.cli.main, headway.cluster.submit.runs, headway.agent, headway.hardware, typer._adapters"
    subprocess.run([sys.executable, "-c", words], check=True)
    return time.time() - began


def call(bench: Bench, engine: Engine) -> float:
    """The engine's own part."""
    file, line = bench.mark()
    folder = bench.folder / f"job-{bench.number}"
    folder.mkdir()
    request = LaunchRequest("bench", ("bash", bench.script(line)), folder)
    began = time.time()
    engine.launch(request)
    return took(file, began)


def bare_process(bench: Bench) -> float:
    """A plain process."""
    file, line = bench.mark()
    script = bench.script(line)
    began = time.time()
    subprocess.Popen(["bash", script]).wait()
    return took(file, began)


def bare_slurm(bench: Bench) -> float:
    """sbatch of a script that has srun start ours."""
    file, line = bench.mark()
    script = bench.script(line)
    job = bench.folder / f"sbatch-{bench.number}.sh"
    job.write_text(f"#!/bin/bash\nsrun --ntasks=1 --output=none --error=none bash {script}\n")
    began = time.time()
    subprocess.run(["sbatch", "--output=/dev/null", str(job)], stdout=subprocess.DEVNULL, check=True)
    return took(file, began)


def bare_ray(bench: Bench, address: str) -> float:
    """A process that connects, reserves a placement group and has a task run ours in it."""
    file, line = bench.mark()
    words = ["bash", bench.script(line)]
    (bench.folder / "ray_bare.py").write_text(RAY_TASK)
    began = time.time()
    subprocess.run([sys.executable, str(bench.folder / "ray_bare.py"), address, *words], check=True)
    return took(file, began)


def called_ray(bench: Bench, once: Callable[[list[str]], None]) -> float:
    """The same in a process that is connected."""
    file, line = bench.mark()
    words = ["bash", bench.script(line)]
    began = time.time()
    once(words)
    return took(file, began)


@contextlib.contextmanager
def ways(name: str, bench: Bench) -> Iterator[dict[str, Callable[[], float]]]:
    """An engine that runs, and the ways to have something started on it."""
    runs = bench.folder / "runs"
    if name == "local":
        engine = open_engine("local", runs)
        bare = lambda: bare_process(bench)  # noqa: E731
        yield {"verb": lambda: verb(bench, name), "call": lambda: call(bench, engine), "bare": bare}
    elif name == "slurm":
        from slurm_cluster import slurm_cluster

        (bench.folder / "slurm").mkdir()
        with slurm_cluster(bench.folder / "slurm"):
            engine = open_engine("slurm", runs)
            bare = lambda: bare_slurm(bench)  # noqa: E731
            yield {"verb": lambda: verb(bench, name), "call": lambda: call(bench, engine), "bare": bare}
    else:
        yield from ray_ways(bench)


def ray_ways(bench: Bench) -> Iterator[dict[str, Callable[[], float]]]:
    """Those of Ray."""
    from ray_cluster import ray_cluster

    with ray_cluster() as cluster:
        os.environ["RAY_ADDRESS"] = cluster.address
        engine = open_engine("ray", bench.folder / "runs")
        engine.inventory()  # connects this process
        spoken: dict[str, Callable[[list[str]], None]] = {"__name__": "bare"}  # type: ignore[dict-item]
        exec(RAY_TASK, spoken)
        yield {
            "verb": lambda: verb(bench, "ray"),
            "call": lambda: call(bench, engine),
            "bare": lambda: bare_ray(bench, cluster.address),
            "bare call": lambda: called_ray(bench, spoken["once"]),
        }


def measured(name: str, bench: Bench, repeat: int) -> dict[str, object]:
    """Each way in turn, the first round for warmth only."""
    with ways(name, bench) as there:
        there["imports"] = imports
        for way in there.values():
            way()
        times: dict[str, list[float]] = {key: [] for key in there}
        for _ in range(repeat):
            for key, way in there.items():
                times[key].append(way())
    medians = {key: statistics.median(values) for key, values in times.items()}
    above_verb = medians["verb"] - medians["bare"]
    above_call = medians["call"] - medians.get("bare call", medians["bare"])
    print(f"{name:6} " + "  ".join(f"{key} {value:.3f} s" for key, value in medians.items()))
    ratio, kept = medians["verb"] / medians["bare"], "under" if above_verb < GOAL_S else "NOT under"
    print(f"       the verb {above_verb:+.3f} s above bare ({ratio:.1f} x), {kept} {GOAL_S:g} s")
    print(f"       the engine's own part {above_call:+.3f} s")
    return {"median_s": medians, "verb_above_bare_s": above_verb, "call_above_bare_s": above_call, "all_s": times}


def main() -> None:
    """Measure each engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "submit_cpu.json")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--engines", default="local,slurm,ray")
    options = parser.parse_args()
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        for name in options.engines.split(","):
            folder = Path(place) / name
            folder.mkdir()
            build_dataset(folder / "data", [f"{Path(json.__file__).parent}/*.py"], BuildOptions(vocab_size=300))
            text = (ROOT / "recipes" / "demo.toml").read_text()
            (folder / "demo.toml").write_text(text.replace("data/python-stdlib", str(folder / "data")))
            try:
                found[name] = measured(name, Bench(folder), options.repeat)
            except AssertionError as error:
                if "not installed" not in str(error):
                    raise
                print(f"{name:6} left out: {str(error).splitlines()[0]}")
    options.out.write_text(
        json.dumps({"cores": os.cpu_count(), "repeat": options.repeat, "engines": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
