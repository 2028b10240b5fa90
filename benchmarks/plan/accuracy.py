"""How far the planner is off: every figure that the docs quote, in one command.

    python benchmarks/plan/accuracy.py [--refit] [--seeds 8]

Predicts the published runs and the A100 iterations in this folder (unseen, calibrated, fitted on all), the steps that
were measured on an H200 (benchmarks/plan/h200_steps.py makes those), and times the search. Prints the tables, and
writes benchmarks/results/plan_accuracy.json and plan_accuracy.svg. --refit fits the parameters first (fit.py, three
minutes).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.hardware import parse_on
from headway.plan.accuracy.score import AccuracyReport, Scores, as_json, score_file
from headway.plan.candidates import settings_of
from headway.plan.costs import make_cost_model
from headway.plan.efficiencies import SPREAD, Efficiencies, fitted_parameters
from headway.plan.estimate import estimate
from headway.plan.plan import make_task, plan
from headway.plan.settings import Mesh
from headway.recipe import Data, Model, Recipe, Train, load_recipe

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks/results"


def show(title: str, table: Iterable[tuple[str, Scores]]) -> None:
    print(f"\n{title}\n  {'':<44}{'n':>4} {'mean':>7} {'median':>7} {'p90':>7} {'bias':>7} {'rank':>5}")
    for name, scores in table:
        rank = f"{scores.spearman:.2f}" if scores.spearman is not None else "-"
        shares = (scores.mean, scores.median, scores.p90)
        figures = " ".join(f"{share:>7.1%}" for share in shares)
        print(f"  {name[-44:]:<44}{scores.count:>4} {figures} {scores.bias:>+7.1%} {rank:>5}")


def show_tables(report: AccuracyReport) -> None:
    show("groups", report.tables["groups"].items())
    for name in ("unseen", "calibrated", "fitted on all"):
        show(name, report.tables[name].items())


def over_seeds(file: Path, seeds: int) -> dict[str, float]:
    """Mean and median errors of the calibrated table over several seeds."""
    tables = [score_file(file, seed=seed).tables["groups"]["calibrated: the rest"] for seed in range(seeds)]
    return {
        "seeds": seeds,
        "mean": statistics.fmean(scores.mean for scores in tables),
        "worst mean": max(scores.mean for scores in tables),
        "median": statistics.fmean(scores.median for scores in tables),
        "p90": statistics.fmean(scores.p90 for scores in tables),
    }


def h200_steps() -> list[dict[str, Any]]:
    """Steps of Headway's own parts on an H200, predicted from its measured ceilings."""
    cluster = parse_on("h200")
    rows = json.loads((RESULTS / "plan_h200_steps.json").read_text(encoding="utf-8"))["rows"]
    predicted = []
    for row in rows:
        train = Train(batch=row["microbatch"] * row["accumulate"], dtype="bfloat16", compile=row["compile"])
        recipe = Recipe(model=Model(**row["model"]), data=Data(path="data", seq=row["seq"]), train=train)
        task = make_task(recipe, cluster)
        settings = replace(
            settings_of(task, Mesh(), 0, row["microbatch"]), recompute="full" if row["checkpoint"] else "none"
        )
        prediction = estimate(task.architecture, settings, make_cost_model(cluster, "measured"))
        measured = row.get("step_s", {}).get("median")
        predicted.append({
            "name": row["name"],
            "host_bound": row.get("host_bound"),
            "step_s": measured,
            "predicted_step_s": prediction.step.seconds,
            "step_error": prediction.step.seconds / measured - 1 if measured else None,
            "peak_gib": row["peak_allocated"] / 2**30,
            "predicted_peak_gib": prediction.memory.allocated / 2**30,
            "memory_error": prediction.memory.allocated / row["peak_allocated"] - 1 if measured else None,
            "fits": prediction.memory.fits,
            "ran": measured is not None,
        })  # fmt: skip
    return predicted


def h200_rows() -> list[dict[str, Any]]:
    """Steps with experts and in float8, as benchmarks/train_gpu.py measured them, planned from their recipes."""
    cluster = parse_on("h200")
    predicted = []
    for row in json.loads((RESULTS / "plan_h200_rows.json").read_text(encoding="utf-8"))["rows"]:
        recipe = Recipe(
            model=Model(**row["model"]), data=Data(path="data", seq=row["seq"]), train=Train(**row["train"])
        )
        planned = plan(recipe, cluster, fidelity="measured")
        prediction = planned.best.estimate
        predicted.append({
            "name": row["row"],
            "runnable": planned.best.runnable,
            "step_s": row["step_s"],
            "predicted_step_s": prediction.step.seconds,
            "step_error": prediction.step.seconds / row["step_s"] - 1,
            "peak_gib": row["peak_gib"],
            "predicted_peak_gib": prediction.memory.allocated / 2**30,
            "memory_error": prediction.memory.allocated / 2**30 / row["peak_gib"] - 1,
        })  # fmt: skip
    return predicted


def show_rows(rows: list[dict[str, Any]]) -> None:
    print("\nexperts and float8 on an H200")
    for row in rows:
        times = f"{row['step_s'] * 1e3:>8.1f} ms {row['predicted_step_s'] * 1e3:>8.1f} ms {row['step_error']:>+7.1%}"
        memory = f"{row['peak_gib']:>9.1f} {row['predicted_peak_gib']:>7.1f} {row['memory_error']:>+7.1%}"
        print(f"  {row['name']:<24}{times} {memory}{'' if row['runnable'] else '  the trainer cannot run it'}")


def show_h200(rows: list[dict[str, Any]]) -> None:
    print(f"\nsteps on an H200\n  {'':<24}{'measured':>11} {'predicted':>11} {'':>7} {'peak GiB':>9} {'predicted':>10}")
    for row in rows:
        if not row["ran"]:
            verdict = "to fit" if row["fits"] else "not to fit"
            print(f"  {row['name']:<24}{'out of memory':>23} {'':>7} predicted {verdict}")
            continue
        times = f"{row['step_s'] * 1e3:>8.1f} ms {row['predicted_step_s'] * 1e3:>8.1f} ms {row['step_error']:>+7.1%}"
        memory = f"{row['peak_gib']:>9.1f} {row['predicted_peak_gib']:>7.1f} {row['memory_error']:>+7.1%}"
        print(f"  {row['name']:<24}{times} {memory}{'  waits for its host' if row['host_bound'] else ''}")
    ran = [row for row in rows if row["ran"]]
    for title, kept in (("on the device", [row for row in ran if not row["host_bound"]]), ("all", ran)):
        errors = [abs(row["step_error"]) for row in kept]
        print(f"  {title}: {len(errors)} steps, mean {statistics.fmean(errors):.1%}, worst {max(errors):.1%}")
    errors = [abs(row["memory_error"]) for row in ran]
    print(f"  peak memory: mean {statistics.fmean(errors):.1%}, worst {max(errors):.1%}")


def search_times() -> dict[str, float]:
    """Seconds from a recipe to a plan, in this process."""
    times = {}
    for name, on in (("llama3-8b", "h100x8x4"), ("llama3-70b", "h100x8x64"), ("llama3-405b", "h100x8x2048")):
        recipe, cluster = load_recipe(ROOT / f"recipes/{name}.toml"), parse_on(on)
        start = time.perf_counter()
        planned = plan(recipe, cluster)
        times[f"{name} on {on}"] = time.perf_counter() - start
        mesh = planned.best.estimate.settings.mesh.describe()
        print(f"  {name:<12} {on:<13} {times[f'{name} on {on}']:.2f} s, {planned.result.tried} candidates, {mesh}")
    return times


def draw(report: AccuracyReport, file: Path) -> None:
    """Measured against predicted, unseen, both axes logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "headway"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 6.4))
    rows = [row for row in report.rows if row.case is not None and row.by_table]
    for label, color, chosen in (
        ("A100, dense", "#2a7f9e", lambda row: row.case.dense and row.chip.startswith("a100")),
        ("H100 and H200, dense", "#d1702c", lambda row: row.case.dense and row.chip in ("h100", "h200")),
        ("other chips, dense", "#8c8c8c", lambda row: row.case.dense and row.chip[0] not in "ah"),
        ("experts", "#6a4fa3", lambda row: not row.case.dense),
    ):
        kept = [row for row in rows if chosen(row)]
        axes.scatter([row.measured for row in kept], [row.by_table["unseen"] for row in kept], s=14, color=color,
                     alpha=0.75, linewidths=0, label=f"{label} ({len(kept)})")  # fmt: skip
    ends = (15, 3e5)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(
        ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="black", alpha=0.08, linewidth=0
    )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured tokens/s a device",
             ylabel="predicted, no run of the program seen")  # fmt: skip
    axes.set_title("Published runs and what the planner says (band: 10 %)", fontsize=11)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refit", action="store_true", help="fit the parameters first")
    parser.add_argument("--seeds", type=int, default=8, help="calibrations to average over")
    given = parser.parse_args()
    if given.refit:
        subprocess.run([sys.executable, str(HERE / "fit.py")], check=True)

    runs, iterations = score_file(HERE / "published_runs.csv"), score_file(HERE / "a100_iterations.csv")
    print("published runs")
    show_tables(runs)
    print("\nA100 iterations")
    show_tables(iterations)
    seeds = {
        "published runs": over_seeds(HERE / "published_runs.csv", given.seeds),
        "A100 iterations": over_seeds(HERE / "a100_iterations.csv", given.seeds),
    }
    for name, scores in seeds.items():
        mean, worst = f"{scores['mean']:.1%}", f"{scores['worst mean']:.1%}"
        rest = f"median {scores['median']:.1%}, p90 {scores['p90']:.1%}"
        print(f"{name}, calibrated, {given.seeds} seeds: mean {mean} (worst seed {worst}), {rest}")
    steps = h200_steps()
    show_h200(steps)
    rows = h200_rows()
    show_rows(rows)
    print("\nsearch")
    times = search_times()
    print("\nparameters: prior, fitted on all, spread of the prior")
    for name, spread in SPREAD.items():
        prior, fitted = getattr(Efficiencies(), name), getattr(fitted_parameters(), name)
        print(f"  {name:<12}{prior:>10.4g}{fitted:>10.4g}  x/ {1 + spread:.2f}")
    results = {
        "published_runs": as_json(runs)["tables"], "a100_iterations": as_json(iterations)["tables"], "seeds": seeds,
        "h200_steps": steps, "h200_rows": rows, "search_s": times,
    }  # fmt: skip
    (RESULTS / "plan_accuracy.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(runs, RESULTS / "plan_accuracy.svg")
    draw(runs, RESULTS / "plan_accuracy.png")


if __name__ == "__main__":
    main()
