"""Fits the constants of `headway plan --serve` to some measured rows of the engine, and scores all rows with them.

    python benchmarks/plan/fit_serving.py

Constants belong into `EngineConstants` (src/headway/plan/serving_latency.py); a test compares.
"""

from dataclasses import asdict
from pathlib import Path

from headway.plan.accuracy.serving_rows import fit_constants, read_rows, rounded

ROWS = Path(__file__).parents[1] / "results/serving_rows_h200.json"


def main() -> None:
    rows = read_rows(ROWS)
    constants = rounded(fit_constants(rows))
    for name, value in asdict(constants).items():
        print(f"{name:<16} {value:.4g}")
    print(f"\n{'row':<50}{'measured':>10}{'predicted':>11}{'error':>9}")
    for row in rows:
        used = "fitted" if row.fitted else ""
        predicted, error = row.predicted(constants), row.error(constants)
        print(f"{row.name:<50}{row.measured:>10,.5g}{predicted:>11,.5g}{error:>+9.1%}  {used}".rstrip())
    for title, group in (("fitted", [r for r in rows if r.fitted]), ("predicted", [r for r in rows if not r.fitted])):
        errors = [abs(row.error(constants)) for row in group]
        print(f"{title}: {len(group)} rows, mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
