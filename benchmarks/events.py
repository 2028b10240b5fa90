"""What recording a step costs the training loop, and how fast a metric reads back, beside TensorBoard.

    python benchmarks/events.py [--steps 100000] [--json]

Both record the same step: loss, gradient norm, learning rate and tokens (Headway also its times, cursor and chain).
Caller's cost is the time of the one call in the loop, at a pace of one step a millisecond and back to back; the
writers' threads run beside it. TensorBoard is left out when it is not installed.
"""

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from headway.track import START, Recorder, create_run, extend_chain, read_metric, read_run, record_path
from headway.track.ledger import account

PACED_STEPS = 2000
LIMITS = {"paced p99": 50.0, "read one metric": 0.5}  # microseconds, seconds: what the project promises

Record = Callable[[int], None]


def numbers(step: int) -> dict[str, float]:
    return {"loss": 3.0 + 1.0 / step, "grad_norm": 1.0 + 0.1 / step, "lr": 3e-4 / step, "tokens": 65536}


def headway_writer(folder: Path) -> tuple[Record, Callable[[], object]]:
    recorder = Recorder(record_path(folder, 1, "rank-0"), attempt=1, process="rank-0")
    link = extend_chain(START, 1, 8, 3.0, 1.0)

    def record(step: int) -> None:
        at = time.monotonic_ns()
        recorder.event(
            "step", at=at, step=step, data=123_456, compute=98_765_432, cursor=8 * step, chain=link, **numbers(step)
        )

    return record, recorder.close


def tensorboard_writer(folder: Path) -> tuple[Record, Callable[[], object]]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))

    def record(step: int) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers(step).items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    return record, writer.close


def caller_cost_us(record: Record, steps: int, pause_s: float) -> dict[str, float]:
    """Return the median and the 99th percentile of one call."""
    costs = []
    for step in range(1, steps + 1):
        begin = time.perf_counter_ns()
        record(step)
        costs.append((time.perf_counter_ns() - begin) / 1e3)
        if pause_s:
            time.sleep(pause_s)
    return {"median": statistics.median(costs), "p99": statistics.quantiles(costs, n=100)[98]}


def measure(writer: Callable[[Path], tuple[Record, Callable[[], object]]], root: Path, steps: int) -> dict[str, float]:
    """Return what writing costs, the last file being left in root/long for the reader."""
    record, close = writer(root / "paced")
    paced = caller_cost_us(record, PACED_STEPS, 0.001)
    close()
    begin = time.perf_counter()
    record, close = writer(root / "long")
    burst = caller_cost_us(record, steps, 0.0)
    close()
    rate = steps / (time.perf_counter() - begin)
    return {
        "paced median": paced["median"],
        "paced p99": paced["p99"],
        "back to back median": burst["median"],
        "back to back p99": burst["p99"],
        "steps/s to disk": rate,
        "bytes a step": sum(path.stat().st_size for path in (root / "long").iterdir()) / steps,
    }


def seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure_headway(root: Path, steps: int) -> dict[str, float]:
    run = create_run(root, "bench", "bench")
    found = measure(headway_writer, root / "headway", steps)
    run.events.rmdir()
    (root / "headway" / "long").rename(run.events)

    def read() -> None:
        assert len(read_metric(run, "loss")[0]) == steps

    found["read one metric"] = seconds(read, 5)
    found["read and account"] = seconds(lambda: account(read_run(run)), 3)
    return found


def measure_tensorboard(root: Path, steps: int) -> dict[str, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = measure(tensorboard_writer, root / "tensorboard", steps)

    def read() -> None:
        reader = EventAccumulator(str(root / "tensorboard" / "long"), size_guidance={"scalars": 0})
        reader.Reload()
        assert len(reader.Scalars("loss")) == steps

    found["read one metric"] = seconds(read, 1)
    return found


UNITS = {
    "paced median": "us",
    "paced p99": "us",
    "back to back median": "us",
    "back to back p99": "us",
    "steps/s to disk": "1/s",
    "bytes a step": "B",
    "read one metric": "s",
    "read and account": "s",
}


def table(ours: dict[str, float], theirs: dict[str, float]) -> list[str]:
    lines = [f"{'':22} {'Headway':>10} {'TensorBoard':>12} {'ratio':>7}   limit"]
    for name, unit in UNITS.items():
        mine, other = ours[name], theirs.get(name)
        better = None if not other else mine / other if unit == "1/s" else other / mine
        limit = f"{LIMITS[name]:g}  {'ok' if mine < LIMITS[name] else 'MISSED'}" if name in LIMITS else ""
        shown = [
            "-" if value is None else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}" for value in (mine, other)
        ]
        ratio = "-" if better is None else f"{better:.1f}x"
        lines.append(f"{f'{name}, {unit}':22} {shown[0]:>10} {shown[1]:>12} {ratio:>7}   {limit}")
    return [line.rstrip() for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours = measure_headway(Path(folder), options.steps)
        there = importlib.util.find_spec("tensorboard") is not None
        theirs = measure_tensorboard(Path(folder), options.steps) if there else {}
    load = os.getloadavg()[0]
    if options.json:
        print(json.dumps({"steps": options.steps, "load": load, "headway": ours, "tensorboard": theirs}, indent=2))
        return
    print(
        f"{options.steps:,} steps, {os.cpu_count()} cores, load {load:.1f}; ratio: how many times better Headway is\n"
    )
    print("\n".join(table(ours, theirs)))


if __name__ == "__main__":
    main()
