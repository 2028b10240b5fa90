"""Whether reinforcement learning teaches a real model something: correct answers to held-out one-step arithmetic.

    python benchmarks/rl_learning.py MODEL MAWPS.jsonl [--seeds 1 2 3 4 5] [--lr 3e-5] [--limit 280] [--out FILE]
        [--at-once 5] [--set KEY=VALUE ...]

MODEL is a folder with a chat template, such as SmolLM2-135M-Instruct. Every run is `headway train` of
recipes/grpo-mawps.toml with a seed of its own; runs share the device, and stop (SIGTERM: they save, and exit) when
--reserve seconds are left of --limit. The reward is correctness alone. Correctness of the model before, and of the
state that each run has saved, is that of the same 161 held-out questions, answered greedily by `headway eval`. Exit
status 0 if it rises by at least 0.2 in the mean over the seeds of the best learning rate.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
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
STOP_S = 40.0
"""For a run that was told to stop: to end its step, and to save."""


class Proof:
    """The runs and evaluations, within a time limit."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.began = options, folder, time.monotonic()
        self.model, self.data, self.runs = str(options.model.resolve()), folder / "data", folder / "runs"
        self.tasks = str(self.data / "mawps-files" / "held-out.toml")

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    def run(self) -> int:
        """Evaluate the model, train it with every seed, evaluate what came out, and tell."""
        options = self.options
        words = [str(options.mawps.resolve()), str(self.data / "mawps-files"), "--max-tokens", str(options.max_tokens)]
        subprocess.run([sys.executable, str(ROOT / "examples" / "mawps.py"), *words], check=True)
        prompts = str(self.data / "mawps-files" / "prompts.jsonl")
        words = ["data", "build", str(self.data / "mawps"), prompts, "--chat", self.model, "--prompts"]
        if self.headway(words, "build", options.limit):
            sys.exit(self.end_of("build"))
        work = list(itertools.product(options.lr, options.seeds))
        with ThreadPoolExecutor(options.at_once + 1) as pool:
            first = pool.submit(self.correct, self.model, "before")
            results = list(pool.map(lambda pair: self.train(*pair), work))
            before = first.result()
            after = list(pool.map(lambda result: self.correct(result["run"], f"after-{result['run']}"), results))
        for result, correct in zip(results, after, strict=True):
            result["after"] = correct
            result["rise"] = None if correct is None or before is None else correct - before
        return self.tell(before, results)

    def train(self, lr: str, seed: int) -> dict[str, Any]:
        """Train until the deadline."""
        options, run = self.options, f"mawps-{lr}-{seed}"
        settings = [f"model.init={self.model}", f"data.path={self.data / 'mawps'}", f"seed={seed}", f"train.lr={lr}"]
        settings += [f"train.steps={options.steps}", "eval.tasks=[]", "checkpoint.every_steps=0", *options.set]
        words = ["train", str(ROOT / "recipes" / "grpo-mawps.toml"), "--name", run, "--runs", str(self.runs)]
        words += ["--workers", "1", *(word for setting in settings for word in ("--set", setting))]
        status = self.headway(words, run, options.limit - options.reserve)
        result: dict[str, Any] = {"run": run, "lr": lr, "seed": seed, "status": status, "stopped_s": self.seconds}
        result |= {key: self.recorded(run, key) for key in ("reward", "length", "truncated")}
        rewards = result["reward"]
        some = " ".join(f"{value:.2f}" for value in rewards[:: max(1, len(rewards) // 12)])
        print(f"{run}: {len(rewards)} steps, exit status {status}, {self.seconds:.0f} s; rewards {some}", flush=True)
        if status not in (0, 75):
            print(self.end_of(run), flush=True)
        return result

    def correct(self, model: str, name: str) -> float | None:
        """Return the share of held-out questions that a model answers correctly; None if it could not be evaluated."""
        out = self.folder / f"{name}.jsonl"
        words = ["eval", model, "--tasks", self.tasks, "--json", "--out", str(out), "--runs", str(self.runs)]
        if self.headway(words, name, self.options.limit):
            print(self.end_of(name), flush=True)
            return None
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        share = statistics.mean(row["scores"]["math"] for row in rows)
        print(f"{name}: {share:.3f} of {len(rows)} questions, {self.seconds:.0f} s", flush=True)
        return share

    def headway(self, words: list[str], name: str, until_s: float) -> int:
        """Run a command, with its output in a file; tell it to stop when the time is over. Return its exit status."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)}
        with (self.folder / f"{name}.log").open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "headway", *words], cwd=self.folder, stdout=file, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
            for send, seconds in (
                (None, max(until_s - self.seconds, 1)),
                (signal.SIGTERM, STOP_S),
                (signal.SIGKILL, 9),
            ):
                if send is not None:
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(send)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(seconds)
        return 124

    def recorded(self, run: str, key: str) -> list[float]:
        """Return a metric of a run's steps."""
        values = []
        for file in sorted((self.runs / run / "events").glob("*-rank-0.jsonl")):
            for line in file.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if event.get("kind") == "step" and key in event:
                        values.append(float(event[key]))
        return values

    def end_of(self, name: str) -> str:
        """The end of a command's output."""
        return (self.folder / f"{name}.log").read_text()[-1500:]

    def tell(self, before: float | None, results: list[dict[str, Any]]) -> int:
        """Print the table, write the file; return the exit status."""
        print(f"\nheld-out correctness before: {before}\n\n| lr | seed | steps | after | rise |\n|---|---|---|---|---|")
        rises = dict[str, list[float]]()
        for result in results:
            if result["rise"] is not None:
                rises.setdefault(result["lr"], []).append(result["rise"])
                print(f"| {result['lr']} | {result['seed']} | {len(result['reward'])} | {result['after']:.3f} "
                      f"| {result['rise']:+.3f} |")  # fmt: skip
        for lr, values in rises.items():
            print(
                f"lr {lr}: mean rise {statistics.mean(values):+.3f}, least {min(values):+.3f}, of {len(values)} seeds"
            )
        print(f"{self.seconds:.0f} s in all")
        if self.options.out:
            facts = {"command": sys.argv, "before": before, "seconds": self.seconds, "results": results}
            self.options.out.write_text(json.dumps(facts, indent=1) + "\n")
        whole = [statistics.mean(values) for values in rises.values() if len(values) == len(self.options.seeds)]
        return 0 if whole and max(whole) >= RISE else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("mawps", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--lr", nargs="*", default=["3e-5"], help="learning rates; each with all seeds")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a run, if the time suffices")
    parser.add_argument("--at-once", type=int, default=5, help="runs at the same time")
    parser.add_argument("--limit", type=float, default=500, help="seconds for everything")
    parser.add_argument("--reserve", type=float, default=75, help="of them, for saving and the last evaluations")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer to a held-out question")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        return Proof(options, Path(name)).run()


if __name__ == "__main__":
    sys.exit(main())
