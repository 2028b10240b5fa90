"""Queries over recorded metrics: Headway's store beside MLflow, TensorBoard and Trackio.

    python benchmarks/tracking.py [--runs 100] [--steps 10000] [--listed 1000] [--megabytes 1000] [--large-runs 1]
        [--large-only] [--folder DIR] [--peers PYTHON] [--peer-steps 1000]

Every tool gets the same metrics of the same runs, then reads one metric of all of them. Times are CPU-seconds of the
reading process, since other work on the machine makes wall time meaningless; `wall_s` is beside them. PYTHON is one of
an environment of its own, with mlflow, tensorboard and trackio; without it only Headway is measured. Peers get fewer
steps where logging takes them long; their reading time per step is what compares.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEYS = ("loss", "grad_norm", "lr")
PEERS = ("mlflow", "tensorboard", "trackio")
LARGE = {
    "large-first": "one metric of all runs in 1,000 points each, for the first time: all is compacted",
    "large": "the same again",
    "large-filter": "runs filtered by statistics of two metrics",
    "large-steps": "one metric of one run, every step",
}
"""Questions to runs with many bytes of events, in this order."""


@contextmanager
def timed(result: dict[str, Any], name: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    result[name] = {"cpu_s": round(time.process_time() - cpu, 4), "wall_s": round(time.perf_counter() - wall, 4)}


def best_of(times: int, body: Callable[[], Any]) -> dict[str, float]:
    results = []
    for _ in range(times):
        one: dict[str, Any] = {}
        with timed(one, "once"):
            body()
        results.append(one["once"])
    return min(results, key=lambda entry: entry["cpu_s"])


def values(run: int, step: int) -> dict[str, float]:
    """The same numbers for every tool; run 7 has a spike of one step."""
    noise = ((run * 7919 + step * 104729) % 1000) / 1000
    loss = 8.0 / (1 + step / 500) + 2 + noise / 10 + (50 if (run, step) == (7, 777) else 0)
    return {"loss": loss, "grad_norm": 0.5 + noise, "lr": 1e-3 * (1 + run % 4)}


# -- Headway


def make_run(root: Path, run: int, steps: int) -> int:
    """Write a finished run's record as rank 0 and its agent would; return its bytes."""
    folder = root / f"run-{run:05d}"
    for name in ("events", "checkpoints", "logs"):
        (folder / name).mkdir(parents=True)
    opening = {"kind": "open", "format": 1, "attempt": 1, "wall": 1.76e9 + run, "mono": 1, "boot": "", "host": "h"}

    def line(**fields: Any) -> str:
        return json.dumps(fields, separators=(",", ":")) + "\n"

    agent = line(**opening, process="agent", pid=1) + line(kind="attempt", t=1, workers=1, device="cpu", from_step=0)
    agent += line(kind="end", t=10**9 * steps, outcome="finished", reason="all steps done")
    (folder / "events" / "0001-agent.jsonl").write_text(agent)
    with (folder / "events" / "0001-rank-0.jsonl").open("w") as file:
        file.write(line(**opening, process="rank-0", pid=1))
        file.write(line(kind="facts", t=1, flops_per_token=1e6, peak_flops=1e12, total_steps=steps))
        for step in range(1, steps + 1):
            loss, norm, lr = values(run, step).values()
            file.write(
                f'{{"kind":"step","t":{step * 10**9},"step":{step},"data":1000000,"compute":{9 * 10**8 + step % 977},'
                f'"loss":{loss!r},"grad_norm":{norm!r},"lr":{lr!r},"tokens":8192,"cursor":{step * 8},'
                f'"chain":"{step:032x}"}}\n'
            )
        return file.tell()


def measure_headway(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from headway.track import RunFolder
    from headway.track.store import MetricStore, read_series, select_runs

    os.environ["HEADWAY_CACHE"] = str(folder / "cache")
    result: dict[str, Any] = {}
    root = folder / "runs"
    recorded = sum(make_run(root, run, arguments.steps) for run in range(arguments.runs))
    runs = [RunFolder(path) for path in sorted(root.iterdir())]
    result["events_bytes"] = recorded
    with timed(result, "compaction, once"):
        views = read_series(runs, "loss", points=1000, store=MetricStore())
    assert len(views) == arguments.runs
    assert max(float(view.maximum.max()) for view in views) > 50, "the spike is there"
    files = [path for run in runs for path in run.events.glob("*.parquet")]
    result["parquet_bytes"] = sum(path.stat().st_size for path in files)
    store = MetricStore()
    read_series(runs, "loss", store=store)
    result["one metric, warm, every step"] = best_of(5, lambda: read_series(runs, "loss", store=store))
    result["one metric, warm, 1000 points"] = best_of(5, lambda: read_series(runs, "loss", points=1000, store=store))
    verb = [sys.executable, "-m", "headway", "metrics", "run-*", "--key", "loss", "--plot", "-", "--runs", str(root)]
    result["one metric, with process start"] = child(verb)
    listed = folder / "listed"
    for run in range(arguments.listed):
        make_run(listed, run, 20)
    with timed(result, "list, index made"):
        select_runs(listed)
    result["list, warm"] = best_of(5, lambda: select_runs(listed))
    result["list, with process start"] = child([sys.executable, "-m", "headway", "runs", "--runs", str(listed)])
    with timed(result, "query over metrics, statistics made"):
        found = select_runs(listed, "min(loss) < 11 and lr > 2e-3", sort=["-lr"])
    assert found
    result["query over metrics, warm"] = best_of(3, lambda: select_runs(listed, "min(loss) < 11 and lr > 2e-3"))
    return result


def measure_large(folder: Path, megabytes: int, runs: int) -> dict[str, Any]:
    """Compact and query runs with so many bytes of events together, each time in a process of its own."""
    root = folder / "large"
    steps = megabytes * 1_000_000 // 230 // runs
    recorded = make_run(root, 0, steps)
    for run in range(1, runs):  # the same record again: writing it takes longer than reading it
        shutil.copytree(root / "run-00000", root / f"run-{run:05d}")
    result: dict[str, Any] = {"runs": runs, "events_bytes": recorded * runs, "steps": steps * runs}
    for query in LARGE:
        result[query] = child([sys.executable, __file__, "--child", query, "--folder", str(folder)])
    result["parquet_bytes"] = sum(path.stat().st_size for path in root.glob("*/events/*.parquet"))
    return result


def child_large(folder: Path, query: str) -> None:
    """Ask one question of all runs, `LARGE[query]`."""
    from headway.track import RunFolder
    from headway.track.store import MetricStore, read_series, select_runs

    os.environ["HEADWAY_CACHE"] = str(folder / "cache")
    runs = [RunFolder(path) for path in sorted((folder / "large").iterdir())]
    if query == "large-filter":
        assert len(select_runs(folder / "large", "min(loss) < 11 and mean(lr) > 0")) == len(runs)
        return
    runs, points = (runs[:1], None) if query == "large-steps" else (runs, 1000)
    views = read_series(runs, "loss", points=points, store=MetricStore())
    assert len({int(view.count.sum()) for view in views}) == 1
    assert points is not None or views[0].width == 1


def child(command: list[str]) -> dict[str, float]:
    """Run a command; return its CPU-seconds, wall seconds and peak memory."""
    wall = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "80"}
    )
    assert process.stdout is not None
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, process.stderr.read() if process.stderr else command
    cpu = usage.ru_utime + usage.ru_stime
    wall = time.perf_counter() - wall
    return {"cpu_s": round(cpu, 3), "wall_s": round(wall, 3), "peak_mib": round(usage.ru_maxrss / 1024)}


# -- peers; these run with another Python, which has no Headway


def peer_mlflow(folder: Path, runs: int, steps: int, result: dict[str, Any]) -> None:
    import mlflow
    from mlflow.entities import Metric

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    client = mlflow.MlflowClient()
    experiment = client.create_experiment("benchmark", artifact_location=str(folder / "artifacts"))
    ids = []
    with timed(result, "log"):
        for run in range(runs):
            ids.append(client.create_run(experiment).info.run_id)
            for at in range(1, steps + 1, 1000):
                batch = [
                    Metric("loss", values(run, step)["loss"], 0, step) for step in range(at, min(at + 1000, steps + 1))
                ]
                client.log_batch(ids[-1], metrics=batch)
    client = mlflow.MlflowClient()
    with timed(result, "read"):
        histories = [client.get_metric_history(run, "loss") for run in ids]
    assert sum(map(len, histories)) == runs * steps


def peer_tensorboard(folder: Path, runs: int, steps: int, result: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    with timed(result, "log"):
        for run in range(runs):
            writer = EventFileWriter(str(folder / f"tb-{run}"))
            for step in range(1, steps + 1):
                summary = Summary(value=[Summary.Value(tag="loss", simple_value=values(run, step)["loss"])])
                writer.add_event(Event(wall_time=0.0, step=step, summary=summary))
            writer.close()
    total = 0
    with timed(result, "read"):
        for run in range(runs):
            accumulator = EventAccumulator(str(folder / f"tb-{run}"), size_guidance={"scalars": 0})
            accumulator.Reload()
            total += len(accumulator.Scalars("loss"))
    assert total == runs * steps


def peer_trackio(folder: Path, runs: int, steps: int, result: dict[str, Any]) -> None:
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    with timed(result, "log"):
        for run in range(runs):
            metrics = [{"loss": values(run, step)["loss"]} for step in range(1, steps + 1)]
            SQLiteStorage.bulk_log("benchmark", f"run-{run}", metrics, steps=list(range(1, steps + 1)))
    total = 0
    with timed(result, "read"):
        for run in range(runs):
            total += len(SQLiteStorage.get_logs("benchmark", f"run-{run}"))
    assert total >= min(steps, 1) * runs


def measure_peers(python: str, folder: Path, runs: int, steps: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in PEERS:
        own = folder / name
        own.mkdir()
        command = [python, __file__, "--child", name, "--folder", str(own), "--runs", str(runs), "--steps", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            results[name] = {"error": done.stderr.strip().splitlines()[-1:]}
            continue
        results[name] = json.loads(done.stdout.splitlines()[-1])
    return {"runs": runs, "steps": steps, **results}


def child_peer(name: str, folder: Path, runs: int, steps: int) -> None:
    result: dict[str, Any] = {}
    {"mlflow": peer_mlflow, "tensorboard": peer_tensorboard, "trackio": peer_trackio}[name](folder, runs, steps, result)
    result["version"] = __import__("importlib.metadata").metadata.version(name)
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--listed", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=1000, help="Events of the large runs together; 0: none.")
    parser.add_argument("--large-runs", type=int, default=1)
    parser.add_argument("--large-only", action="store_true", help="Measure only the large runs.")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--peers", metavar="PYTHON")
    parser.add_argument("--peer-steps", type=int, default=1000)
    parser.add_argument("--child", choices=[*PEERS, *LARGE])
    arguments = parser.parse_args()
    if arguments.child in LARGE:
        return child_large(arguments.folder, arguments.child)
    if arguments.child is not None:
        return child_peer(arguments.child, arguments.folder, arguments.runs, arguments.steps)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        results: dict[str, Any] = {"load": os.getloadavg()[0]}
        if not arguments.large_only:
            results |= {"runs": arguments.runs, "steps": arguments.steps, "listed": arguments.listed}
            results["headway"] = measure_headway(folder, arguments)
            results["peak_mib_of_this_process"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        if arguments.megabytes:
            results["large"] = measure_large(folder, arguments.megabytes, arguments.large_runs)
        if arguments.peers and not arguments.large_only:
            results["peers"] = measure_peers(arguments.peers, folder, arguments.runs, arguments.peer_steps)
    print(json.dumps(results, indent=2))
    return None


if __name__ == "__main__":
    main()
