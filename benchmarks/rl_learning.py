"""Whether reinforcement learning teaches a real model something: correct answers to held-out one-step arithmetic.

    python benchmarks/rl_learning.py MODEL MAWPS.jsonl [--seeds 1 2 3 4 5] [--lr 2e-5] [--steps 80] [--out FILE]
        [--at-once 5] [--set KEY=VALUE ...]

MODEL is a folder with a chat template, such as SmolLM2-135M-Instruct. Every run is `headway train` of
recipes/grpo-mawps.toml with a seed of its own; runs share the device. The reward is correctness alone. Correctness of
the model before, and of each run at its evaluations, is that of the same 161 held-out questions, answered greedily.
Exit status 0 if it rises by at least 0.2 in the mean over the seeds of the best learning rate.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RISE = 0.2
"""To reach, in the mean over seeds."""


def headway(*words: str, folder: Path, limit_s: float, log: Path) -> int:
    """Run a command with its output in a file; return the exit status, 124 if it took too long."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway", *words], cwd=folder, stdout=file, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout=max(limit_s, 1))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 2)  # as Ctrl-C: it saves, and its processes end
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            return 124


def recorded(runs: Path, run: str, key: str) -> dict[int, float]:
    """A metric of a run by step, as `headway metrics` has it."""
    words = [sys.executable, "-m", "headway", "metrics", run, "--key", key, "--runs", str(runs), "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return {}
    series = json.loads(done.stdout)
    return dict(zip(series["steps"], series["values"], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("mawps", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--lr", nargs="*", default=["2e-5"], help="learning rates; each with all seeds")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--at-once", type=int, default=5, help="runs at the same time")
    parser.add_argument("--limit", type=float, default=500, help="seconds for everything")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer to a held-out question")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        return proof(options, Path(name), began)


def proof(options: argparse.Namespace, folder: Path, began: float) -> int:
    """Evaluate the model, train it with every seed, and print what became of it."""

    def left() -> float:
        return options.limit - (time.monotonic() - began)

    def command(words: list[str], log: str) -> None:
        if status := headway(*words, folder=folder, limit_s=left(), log=folder / log):
            sys.exit(f"headway {words[0]}: exit status {status}\n{(folder / log).read_text()[-1500:]}")

    model, data, runs = str(options.model.resolve()), folder / "data", folder / "runs"
    words = [str(options.mawps.resolve()), str(data / "mawps-files"), "--max-tokens", str(options.max_tokens)]
    subprocess.run([sys.executable, str(ROOT / "examples" / "mawps.py"), *words], check=True)
    prompts = str(data / "mawps-files" / "prompts.jsonl")
    command(["data", "build", str(data / "mawps"), prompts, "--chat", model, "--prompts"], "build.log")

    def before() -> float:
        tasks = str(data / "mawps-files" / "held-out.toml")
        words = ["eval", model, "--tasks", tasks, "--json", "--out", str(folder / "before.jsonl")]
        headway(*words, folder=folder, limit_s=left(), log=folder / "before.log")
        rows = [json.loads(line) for line in (folder / "before.jsonl").read_text().splitlines()]
        return statistics.mean(row["scores"]["math"] for row in rows)

    def train(lr: str, seed: int) -> dict[str, Any]:
        run = f"mawps-{lr}-{seed}"
        settings = [
            f"model.init={model}",
            f"seed={seed}",
            f"train.lr={lr}",
            f"train.steps={options.steps}",
            *options.set,
        ]
        words = [
            "train",
            str(ROOT / "recipes" / "grpo-mawps.toml"),
            "--name",
            run,
            "--runs",
            str(runs),
            "--workers",
            "1",
        ]
        words += [word for setting in settings for word in ("--set", setting)]
        status = headway(*words, folder=folder, limit_s=left() - 15, log=folder / f"{run}.log")
        result = {"lr": lr, "seed": seed, "status": status, "seconds": time.monotonic() - began}
        result |= {"held_out": recorded(runs, run, "held-out/math"), "reward": recorded(runs, run, "reward")}
        result["length"] = recorded(runs, run, "length")
        print(f"lr {lr}  seed {seed}  held-out {result['held_out']}  {result['seconds']:.0f} s", flush=True)
        if not result["held_out"]:
            print((folder / f"{run}.log").read_text()[-1500:], flush=True)
        return result

    with ThreadPoolExecutor(options.at_once + 1) as pool:
        first = pool.submit(before)
        work = list(itertools.product(options.lr, options.seeds))
        results = list(pool.map(lambda pair: train(*pair), work))
        correct = first.result()
    return told(options, correct, results, time.monotonic() - began)


def told(options: argparse.Namespace, correct: float, results: list[dict[str, Any]], seconds: float) -> int:
    """Print the table, write the file; return the exit status."""
    print(f"\nheld-out correctness before: {correct:.3f}\n\n| lr | seed | after | rise |\n|---|---|---|---|")
    rises = dict[str, list[float]]()
    for result in results:
        steps = result["held_out"]
        after = steps[max(steps)] if steps else None
        result["rise"] = None if after is None else after - correct
        if after is not None:
            rises.setdefault(result["lr"], []).append(after - correct)
            print(f"| {result['lr']} | {result['seed']} | {after:.3f} | {after - correct:+.3f} |")
    for lr, values in rises.items():
        print(f"lr {lr}: mean rise {statistics.mean(values):+.3f}, least {min(values):+.3f}, of {len(values)} seeds")
    print(f"{seconds:.0f} s in all")
    if options.out:
        facts = {"command": sys.argv, "before": correct, "seconds": seconds, "results": results}
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    whole = [statistics.mean(values) for values in rises.values() if len(values) == len(options.seeds)]
    return 0 if whole and max(whole) >= RISE else 1


if __name__ == "__main__":
    sys.exit(main())
