"""Lines and tables of what was measured, and the ratios of the sides."""

import statistics
from collections.abc import Sequence
from typing import Any

TARGETS = {"sft": (1.05, 1.3), "lora": (1.3, None), "dpo": (1.2, None)}
"""Ratios to reach: to the best of TRL, and to its defaults."""


def line(result: dict[str, Any]) -> str:
    """For people."""
    text = f"{result['part']:6}{result['way']:24}"
    if "error" in result:
        return text + result["error"]
    text += f"{result['tokens_s']:10,.0f} tokens/s{result['step_s'] * 1e3:9.1f} ms{result['gib']:8.1f} GiB"
    text += f"{result['pairs_s']:8.1f} pairs/s" if result.get("pairs_s") else ""
    spread = (max(result["times_s"]) - min(result["times_s"])) / result["step_s"]
    text += f"   +-{spread / 2:.1%}  loss {result['loss']:.4f}  {result['microbatch']} rows a pass"
    text += ", liger" if result["liger"] else ""
    return text + f"  first step {result['first_s']:.0f} s, process {result['process_s']:.0f} s"


def by_way(part: str, results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The medians of each way that ran."""
    names = dict.fromkeys(result["way"] for result in results if result["part"] == part and "error" not in result)
    medians = {}
    for name in names:
        runs = [r for r in results if (r["part"], r["way"]) == (part, name) and "error" not in r]
        keys = ("tokens_s", "pairs_s", "step_s", "gib", "loss")
        medians[name] = {key: statistics.median(float(run.get(key) or 0) for run in runs) for key in keys}
        medians[name]["runs"] = len(runs)
    return medians


def best_of_trl(medians: dict[str, dict[str, float]], recomputing: bool) -> str | None:
    """Name of TRL's fastest way, its defaults left out."""
    names = [
        name for name in medians
        if name.startswith("trl") and name != "trl defaults" and name.endswith(", recomputing") == recomputing
    ]  # fmt: skip
    return max(names, key=lambda name: medians[name]["tokens_s"], default=None)


def ratios(part: str, results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of tokens per second and memory: Headway's ways to TRL's, by name."""
    medians = by_way(part, results)
    compared = {}
    for ours in (name for name in medians if not name.startswith("trl")):
        best = best_of_trl(medians, ours.endswith(", recomputing"))
        for theirs in (name for name in (best, "trl defaults") if name in medians):
            compared[f"{ours} / {theirs}"] = {
                "tokens_s": medians[ours]["tokens_s"] / medians[theirs]["tokens_s"],
                "memory": medians[ours]["gib"] / max(medians[theirs]["gib"], 1e-9),
            }
    return compared


def print_table(part: str, results: Sequence[dict[str, Any]]) -> None:
    """Medians and ratios, in Markdown."""
    medians = by_way(part, results)
    print(f"| {part} | tokens/s | pairs/s | step, ms | GiB | runs |\n|---|---|---|---|---|---|")
    for name, row in medians.items():
        pairs = f"{row['pairs_s']:,.1f}" if row["pairs_s"] else ""
        print(f"| {name} | {row['tokens_s']:,.0f} | {pairs} | {row['step_s'] * 1e3:,.1f} | {row['gib']:.1f} "
              f"| {row['runs']:.0f} |")  # fmt: skip
    for result in results:
        if result["part"] == part and "error" in result:
            print(f"{result['way']}: {result['error']}")
    to_best, to_defaults = TARGETS[part]
    for names, row in ratios(part, results).items():
        target = to_defaults if names.endswith("defaults") else to_best
        reach = f"  (to reach: {target})" if target else ""
        print(f"{names}: x{row['tokens_s']:.3f} tokens/s, x{row['memory']:.2f} memory{reach}")
    print()


def same_losses(part: str, results: Sequence[dict[str, Any]]) -> bool:
    """Whether both sides had the same losses, step by step."""
    losses = {r["way"]: r["losses"] for r in results if r["part"] == part and "error" not in r}
    if set(losses) != {"headway", "trl sdpa"}:
        return False
    pairs = list(zip(losses["headway"], losses["trl sdpa"], strict=True))
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    print(f"{part}: losses {', '.join(f'{a:.6f} {b:.6f}' for a, b in pairs)}; relative difference {worst:.1e}")
    return worst < 1e-4
