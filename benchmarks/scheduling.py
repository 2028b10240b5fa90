"""Policies beside each other on a log of real jobs, at several sizes of a cluster: how much delay each removes.

    python benchmarks/scheduling.py TRACE.csv.gz [--gpus 192,224,256,288] [--json FILE]
    python benchmarks/scheduling.py TRACE.csv.gz --deadlines --gpus 16,24,32,48      deadlines missed instead

The Slurm-like policy is given time limits of 2 to 20 times the true durations, or the longest limit for all: the
better counts. Headway's own never sees durations or limits.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.simulate import SimulationSetup, compare_policies, read_trace, summary

NAMES = ("headway", "headway without stops", "slurm", "kueue", "fifo")
WITH_DEADLINES = ("headway", "headway elastic", "edf", "las", "slurm", "fifo", "srtf")


def measured(trace, gpus: int, seed: int, names: Sequence[str] = NAMES) -> dict[str, dict]:
    """What each policy makes of the log."""
    found = {}
    for name in names:
        policy = POLICIES[name.split()[0]]
        share = 0.0 if "without" in name else 0.5
        setup = SimulationSetup("a100", 8, gpus // 8, preemptible=share, elastic=float("elastic" in name), seed=seed)
        begin = time.perf_counter()
        outcome = compare_policies(trace, setup, [policy])[policy.name]
        found[name] = summary(outcome) | {"seconds": time.perf_counter() - begin}
    return found


def rows(gpus: int, found: dict[str, dict]) -> list[str]:
    """A line for each policy, and what Headway's own removes."""
    lines = []
    for name, one in found.items():
        lines.append(
            f"{gpus:>5} {name:22}{one['mean_jct_s']:>9.0f}{one['p99_jct_s']:>9.0f}{one['mean_delay_s']:>9.0f}"
            f"{one['worst_delay_s']:>9.0f}{one['mean_delay_long_s']:>9.0f}{one['quota_deficit']:>8.2%}"
            f"{one['preemptions']:>7}{one['seconds']:>7.0f}"
        )
    ours, slurm, fifo = found["headway"], found["slurm"], found["fifo"]
    lines.append(
        f"      removes {1 - ours['mean_delay_s'] / slurm['mean_delay_s']:.1%} of slurm's mean delay, "
        f"{1 - ours['mean_delay_s'] / fifo['mean_delay_s']:.1%} of fifo's; worst "
        f"{ours['worst_delay_s'] / slurm['worst_delay_s']:.2f} x slurm's"
    )
    return lines


def missed(gpus: int, found: dict[str, dict]) -> list[str]:
    """A line for each policy of a log with deadlines."""
    return [
        f"{gpus:>5} {name:22}{one['deadline_misses']:>9}{one['mean_delay_s']:>9.0f}{one['worst_delay_s']:>9.0f}"
        f"{one['preemptions']:>9}"
        for name, one in found.items()
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gpus", default="192,224,256,288")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--deadlines", action="store_true", help="what is missed of the log's deadlines")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    if options.deadlines:
        hopeless = int((trace.submit_s + trace.duration_s > trace.deadline_s).sum())
        print(f"{len(trace)} jobs, of which {hopeless} take longer than their deadlines allow")
        print(f"{'GPUs':>5} {'policy':22}{'missed':>9}{'delay':>9}{'worst':>9}{'stops':>9}")
    else:
        heads = "".join(f"{head:>9}" for head in ("mean", "p99", "delay", "worst", ">24 h"))
        print(f"{'GPUs':>5} {'policy':22}{heads}{'owed':>8}{'stops':>7}{'s':>7}")
    everything = {}
    names, lines = (WITH_DEADLINES, missed) if options.deadlines else (NAMES, rows)
    for gpus in map(int, options.gpus.split(",")):
        everything[gpus] = measured(trace, gpus, options.seed, names)
        print("\n".join(lines(gpus, everything[gpus])), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"jobs": len(trace), "seed": options.seed, "gpus": everything}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
