"""Fits the planner's parameters to published runs, and writes src/headway/plan/fitted.json.

    python benchmarks/plan/fit.py [--check]

One set for all runs, and one for each program that leaves its runs out: predictions of a program's runs with the
latter are what "unseen" means. Dense runs on A100, H100 and H200 count most; a program with many runs does not
outvote the others; lines that a rule had to complete count less.
"""

import argparse
import csv
import json
import sys
from collections import Counter
from pathlib import Path

from headway.plan.accuracy.calibrate import as_json, fit
from headway.plan.accuracy.published_runs import PublishedRun, UnmodelledRun, read_case
from headway.plan.accuracy.score import CORE
from headway.plan.efficiencies import Efficiencies

HERE = Path(__file__).parent
RUNS = HERE / "published_runs.csv"
FITTED = HERE.parents[1] / "src/headway/plan/fitted.json"

FULL_VOTE = 8
"""Runs of a program that count in full; more of them count as that many to the power 0.3 more."""
OTHERS = 0.15
"""Weight of runs with experts or on other chips: their software changed by half in a year."""
ASSUMED = 0.4
"""Weight of runs that a rule had to complete."""


def cases() -> list[PublishedRun]:
    """Every row that can be modelled."""
    runs = []
    with RUNS.open(newline="", encoding="utf-8") as stream:
        for row, line in enumerate(csv.DictReader(stream)):
            try:
                runs.append(read_case(row, line))
            except UnmodelledRun:
                continue
    return runs


def weights(kept: list[PublishedRun]) -> list[float]:
    votes = Counter(case.program for case in kept)

    def weight(case: PublishedRun) -> float:
        many = max(1.0, votes[case.program] / FULL_VOTE) ** -0.7
        core = 1.0 if case.dense and case.chip in CORE else OTHERS
        return many * core * (ASSUMED if case.assumed else 1.0)

    return [weight(case) for case in kept]


def fit_all(kept: list[PublishedRun]) -> dict[str, dict[str, float]]:
    parameters = {"all": as_json(fit(kept, Efficiencies(), weights(kept)))}
    for program in sorted({case.program for case in kept}):
        rest = [case for case in kept if case.program != program]
        parameters[program] = as_json(fit(rest, Efficiencies(), weights(rest)))
        print(f"  without {program:<16} {len(rest)} runs", file=sys.stderr)
    return parameters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the file that is there, write nothing")
    check = parser.parse_args().check
    fitted = {"format": 1, "made_by": "benchmarks/plan/fit.py", "parameters": fit_all(cases())}
    if not check:
        FITTED.write_text(json.dumps(fitted, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {FITTED.name}: {fitted['parameters']['all']}")
        return 0
    stored = json.loads(FITTED.read_text(encoding="utf-8"))["parameters"]
    worst = max(
        abs(fitted["parameters"][name][key] / value - 1)
        for name, values in stored.items()
        for key, value in values.items()
    )
    print(f"largest difference from {FITTED.name}: {worst:.2%}")
    return 0 if worst < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
