"""How fast the simulator is: 100,000 jobs over 1,000 GPUs, policy by policy, on one core.

    python benchmarks/decide/simulator.py [--policy fifo,slurm,headway] [--jobs 100000] [--json FILE]

The jobs have the statistics of Acme's Seren, with gangs of up to 256 GPUs; bounds are in bounds.toml beside this file,
in seconds of processor time, and where one is exceeded the exit status is 1.
"""

import argparse
import json
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

from headway.cluster.simulate import SimulationSetup, find_policies, simulate, summary
from headway.cluster.simulate.synthetic import WORKLOADS, draw_trace

NODES, LARGEST = 125, 256


def main() -> None:
    """Time it, and hold it against the bounds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policy", default="fifo,slurm,headway")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bounds = tomllib.loads((Path(__file__).parent / "bounds.toml").read_text())["simulator_s"]
    workload = replace(WORKLOADS["seren-like"], largest=LARGEST)
    trace = draw_trace(workload, 8 * NODES, options.jobs, options.load, options.seed)
    found, met = {}, True
    for policy in find_policies(options.policy):
        wall, begin = time.perf_counter(), time.process_time()
        told = summary(simulate(trace, SimulationSetup("a100", 8, NODES, seed=options.seed), policy))
        took = time.process_time() - begin
        found[policy.name] = told | {"processor_s": took, "seconds": time.perf_counter() - wall}
        bound = bounds.get(policy.name, max(bounds.values()))
        met &= took <= bound
        cycles = f"{told['cycles']:,} cycles, {told['preemptions']:,} stops, mean delay {told['mean_delay_s']:,.0f} s"
        verdict = "met" if took <= bound else "MISSED"
        print(f"{policy.name:8} {took:6.1f} s   bound {bound:4} s   {verdict}   ({cycles})", flush=True)
    if options.json:
        context = {"jobs": options.jobs, "gpus": 8 * NODES, "load": options.load, "seed": options.seed}
        options.json.write_text(json.dumps(context | {"policies": found}, indent=1) + "\n")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
