"""Do jobs start when `headway why` says? Of jobs that had to wait, how many started before their P50 and P90.

    python benchmarks/start_estimates.py TRACE.csv.gz [--gpus 256] [--jobs 500] [--workers 1] [--json FILE]

A log is simulated and recorded. Of the jobs that did not start in the first cycle after they came some are drawn; each
is estimated from the record as it was then, and what was estimated is compared with what happened. Bounds: 50 and 90 %,
7 points more or less; where one is exceeded the exit status is 1.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from headway.cluster.scheduler.decision_log import record_of, replay_until
from headway.cluster.scheduler.start_estimate import FUTURES, estimate_start
from headway.cluster.simulate import SimulationSetup, find_policies, read_trace, simulate

POINTS = 0.07


class Waited(NamedTuple):
    """A job that did not start at once."""

    name: str
    asked_s: float
    """The first cycle that did not start it."""
    started_s: float


def who_waited(record: Path) -> list[Waited]:
    """Of a record, as they started."""
    new, waits, found = set[str](), dict[str, float](), list[Waited]()
    last = None
    for snapshot, _, history, decided in replay_until(record):
        if history.arrivals and history.arrivals[-1].job.name != last:
            last = history.arrivals[-1].job.name
            new.add(last)
        if not decided:
            continue
        rows, running = snapshot.jobs.rows, snapshot.jobs.running
        waits |= dict.fromkeys(new, snapshot.now_s)
        for name in [name for name in waits if running[rows[name]]]:
            if name not in new:
                found.append(Waited(name, waits[name], snapshot.now_s))
            del waits[name]
        new.clear()
    return found


def estimated(record: Path, asked: list[Waited], futures: int, part: slice) -> list[dict]:
    """Of some jobs what was estimated, and what came."""
    todo = sorted(asked, key=lambda one: (one.asked_s, one.name))[part]
    found = []
    for snapshot, policy, history, decided in replay_until(record):
        while decided and todo and todo[0].asked_s <= snapshot.now_s:
            one, begin = todo.pop(0), time.perf_counter()
            told = estimate_start(snapshot, one.name, snapshot.now_s, policy, history, futures=futures)
            row = snapshot.jobs.rows[one.name]
            found.append(
                {
                    "job": one.name,
                    "at_s": snapshot.now_s,
                    "gpus": int(snapshot.jobs.gpus[row]),
                    "waiting": len(snapshot.queue),
                    "p50_s": told.p50_s,
                    "p90_s": told.p90_s,
                    "started_s": one.started_s - one.asked_s,
                    "seconds": time.perf_counter() - begin,
                }
            )
        if not todo:
            break
    return found


def shares(found: list[dict]) -> dict[str, float]:
    """How many started before what was said."""
    started = np.array([one["started_s"] for one in found])
    told = {name: np.array([one[name] for one in found]) for name in ("p50_s", "p90_s")}
    return {
        "before_p50": float((started <= told["p50_s"]).mean()),
        "before_p90": float((started <= told["p90_s"]).mean()),
        "median_wait_s": float(np.median(started)),
        "median_p50_s": float(np.median(told["p50_s"])),
        "median_p90_s": float(np.median(told["p90_s"])),
        "median_error": float(np.median(np.abs(told["p50_s"] - started) / started)),
        "seconds_each": float(np.mean([one["seconds"] for one in found])),
        "slowest_s": float(max(one["seconds"] for one in found)),
    }


def main() -> None:
    """Print how many started in time."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gpus", type=int, default=256)
    parser.add_argument("--policy", default="headway")
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--futures", type=int, default=FUTURES)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    (policy,) = find_policies(options.policy)
    with tempfile.TemporaryDirectory() as folder:
        record = record_of(Path(folder), policy.name)
        simulate(read_trace(options.trace), SimulationSetup("a100", 8, options.gpus // 8), policy, record=record)
        waited = who_waited(record)
        asked = Random(options.seed).sample(waited, min(options.jobs, len(waited)))
        parts = [slice(number, None, options.workers) for number in range(options.workers)]
        with multiprocessing.Pool(options.workers) as pool:
            each = pool.map(partial(estimated, record, asked, options.futures), parts)
    found = sorted((one for part in each for one in part), key=lambda one: (one["at_s"], one["job"]))
    told = shares(found)
    print(f"{len(found)} of {len(waited):,} jobs that had to wait, {options.futures} futures each, {options.gpus} GPUs")
    medians = [f"{told[f'median_{name}_s']:,.0f} s" for name in ("wait", "p50", "p90")]
    print("medians: waited {}, P50 {}, P90 {}".format(*medians))
    print(f"half of the P50 were off by more than {told['median_error']:.0%} of the wait")
    print(f"an estimate took {told['seconds_each']:.1f} s, the slowest {told['slowest_s']:.1f} s")
    met = True
    for name, want in (("before_p50", 0.5), ("before_p90", 0.9)):
        good = abs(told[name] - want) <= POINTS
        met &= good
        bound = f"bound {want:.0%} +- {POINTS:.0%}   {'met' if good else 'MISSED'}"
        print(f"started {name.replace('_p', ' P')}: {told[name]:6.1%}   {bound}")
    if options.json:
        context = {"gpus": options.gpus, "policy": policy.name, "seed": options.seed, "futures": options.futures}
        context |= {"waited": len(waited), "jobs": len(found)}
        each = {name: [one[name] for one in found] for name in found[0]}
        options.json.write_text(json.dumps(context | told | {"each": each}) + "\n")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
