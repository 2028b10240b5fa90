"""Whether reinforcement learning teaches a real model something: correct answers to held-out one-step arithmetic.

    python benchmarks/rl_learning.py MODEL MAWPS.jsonl [--seeds 1 2 3 4 5] [--lr 4e-5] [--limit 500] [--out FILE]
        [--set KEY=VALUE ...]

MODEL is a folder with a chat template, such as SmolLM2-135M-Instruct. Every seed is a run of recipes/grpo-mawps.toml,
by the trainer's own loop. Runs follow each other in this process, which imports and compiles once, in a step that does
not count. They share what is left of --limit: one that has used its share stops at the end of a step, unless it has
made --steps. The reward is correctness alone. Correctness of the model before, and after each run, is that of the same
161 held-out questions, answered greedily. Exit status 0 if it rises by at least 0.2 in the mean over the seeds.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headway.agent import new_run
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.parallel import World
from headway.recipe import Assignment, Recipe
from headway.recipe.load import load_recipe
from headway.track import Recorder, RunFolder, read_evaluations, read_recipe, record_path
from headway.track.heartbeat import PAGE, HeartbeatWriter
from headway.train.build import Parts, build
from headway.train.evaluate_tasks import evaluate_tasks, tasks_of
from headway.train.loop import train
from headway.train.stop import StopRequest
from rl_gpu import NoSaves, spans_of

ROOT = Path(__file__).resolve().parent.parent
RISE = 0.2
"""To reach, in the mean over seeds."""
EVALUATION_S = 10.0
"""For the last evaluation of a run, and what is between two runs; the first run's corrects it."""


class Deadline(NoSaves):
    """Stands for the channel to an agent; it has a run stop at a time."""

    def __init__(self, stop: StopRequest, device: torch.device, at_s: float) -> None:
        super().__init__(device)
        self._stop, self._at_s = stop, at_s

    def tick(self) -> None:
        """The end of a step."""
        super().tick()
        self._stop.asked = self._stop.asked or time.monotonic() > self._at_s


class Proof:
    """The runs, within a time limit."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.began = options, folder, time.monotonic()
        self.files, self.data = folder / "mawps-files", folder / "mawps"
        self.before = 0.0
        self.evaluation_s = EVALUATION_S
        self.device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    def run(self) -> int:
        """Train the model with every seed, evaluate before and after, and tell."""
        options = self.options
        words = [str(options.mawps.resolve()), str(self.files), "--max-tokens", str(options.max_tokens)]
        subprocess.run([sys.executable, str(ROOT / "examples" / "mawps.py"), *words], check=True)
        build_chat_dataset(self.data, [self.files / "prompts.jsonl"], ChatOptions(str(options.model), prompts=True))
        self.warm_up(options.seeds[0])
        results = list[dict[str, Any]]()
        for number, seed in enumerate(options.seeds):
            share_s = (options.limit - self.seconds) / (len(options.seeds) - number)
            results.append(self.train(seed, time.monotonic() + share_s))
            self.write(results)
        return self.tell(results)

    def warm_up(self, seed: int) -> None:
        """Evaluate the model as it is, and make a step that does not count."""
        with self.parts(seed, "warm") as parts:
            self.before = self.correct(parts, 0)
            train(parts, Deadline(parts.stop, self.device, 0.0))  # type: ignore[arg-type]
        print(f"compiled: {self.seconds:.0f} s", flush=True)

    def recipe(self, seed: int) -> Recipe:
        """The recipe of a run."""
        options = self.options
        settings = [f"model.init={options.model}", f"data.path={self.data}", f"seed={seed}", f"train.lr={options.lr}"]
        settings += [f"train.steps={options.steps}", "eval.tasks=[]", "checkpoint.every_steps=0"]
        return load_recipe(ROOT / "recipes" / "grpo-mawps.toml", [*settings, *options.set])

    @contextmanager
    def parts(self, seed: int, name: str) -> Iterator[Parts]:
        """Build a run."""
        gc.collect()  # graphs and caches of the run before are in cycles, and its caller has let go of it by now
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        attempt = new_run(self.recipe(seed), self.folder / "runs", workers=1, name=name)
        run, recipe = attempt.folder, read_recipe(attempt.folder)
        torch.set_num_threads(attempt.threads)
        assignment = Assignment(
            run=str(run.path), attempt=1, rank=0, workers=1, device=self.device.type, threads=attempt.threads, log="",
            rendezvous="", asked_ns=time.monotonic_ns(),
        )  # fmt: skip
        recorder = Recorder(record_path(run.events, 1, "rank-0"), attempt=1, process="rank-0")
        beat = HeartbeatWriter(memoryview(bytearray(PAGE)))
        parts = build(assignment, recipe, World(0, 1, self.device), recorder, StopRequest(), beat, None)
        yield parts
        parts.feed.close()
        recorder.close()

    def train(self, seed: int, until_s: float) -> dict[str, Any]:
        """Train until a time; return what came of it."""
        began = self.seconds
        with self.parts(seed, f"mawps-{seed}") as parts:
            saves = Deadline(parts.stop, self.device, until_s - self.evaluation_s)
            started = self.seconds
            train(parts, saves)  # type: ignore[arg-type]
            trained_s = self.seconds - started
            after, run = self.correct(parts, len(saves.ends)), parts.run
        result: dict[str, Any] = {"seed": seed, "after": after, "rise": after - self.before, "steps": len(saves.ends)}
        result |= {key: recorded(run, key) for key in ("reward", "length", "truncated", "mismatch")}
        result |= {"began_s": began, "started_s": started, "trained_s": trained_s, "ended_s": self.seconds}
        result["spans_s"] = spans_of(run.events, since=2)
        rewards = result["reward"]
        some = " ".join(f"{value:.2f}" for value in rewards[:: max(1, len(rewards) // 12)])
        print(f"{run.name}: {len(rewards)} steps in {trained_s:.0f} s, {after:.3f}; rewards {some}", flush=True)
        spans = ", ".join(f"{name} {seconds:.3f}" for name, seconds in result["spans_s"].items())
        print(f"{run.name}: seconds of a step: {spans}", flush=True)
        return result

    def correct(self, parts: Parts, step: int) -> float:
        """Return the share of held-out questions that the model answers correctly as it is."""
        began = self.seconds
        tasks = tasks_of(parts.recipe.eval.model_copy(update={"tasks": (str(self.files / "held-out.toml"),)}))
        evaluate_tasks(parts, tasks, step)
        done = [each for each in read_evaluations(parts.run) if each.step == step]
        if not done:
            raise SystemExit("\n".join(str(event.get("message")) for event in events_of(parts.run, "log")))
        (metric,) = done[0].metrics
        if step:  # what is before the first step has a start of everything in it
            self.evaluation_s = self.seconds - began + 3
        print(f"step {step}: {metric.value:.3f} of the held-out questions, {self.seconds:.0f} s", flush=True)
        return float(metric.value)

    def tell(self, results: list[dict[str, Any]]) -> int:
        """Print the table, write the file; return the exit status."""
        print(f"\nheld-out correctness before: {self.before:.3f}\n\n| seed | steps | seconds | after | rise |")
        print("|---|---|---|---|---|")
        for result in results:
            print(f"| {result['seed']} | {result['steps']} | {result['trained_s']:.0f} | {result['after']:.3f} "
                  f"| {result['rise']:+.3f} |")  # fmt: skip
        rises = [result["rise"] for result in results]
        mean = statistics.mean(rises)
        print(f"mean rise {mean:+.3f}, least {min(rises):+.3f}, of {len(rises)} seeds; {self.seconds:.0f} s in all")
        return 0 if mean >= RISE else 1

    def write(self, results: list[dict[str, Any]]) -> None:
        """Write what is known so far."""
        if self.options.out:
            facts = {"command": sys.argv, "before": self.before, "seconds": self.seconds, "results": results}
            facts |= {"torch": torch.__version__, "device": self.device.type}
            if self.device.type == "cuda":
                facts["device"] = torch.cuda.get_device_name()
            self.options.out.write_text(json.dumps(facts, indent=1) + "\n")


def recorded(run: RunFolder, key: str) -> list[float]:
    """Return a metric of a run's steps."""
    return [float(event[key]) for event in events_of(run, "step") if key in event]


def events_of(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    """Return what a run recorded of a kind."""
    lines = [line for file in sorted(run.events.glob("*-rank-0.jsonl")) for line in file.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event.get("kind") == kind]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("mawps", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--lr", default="4e-5")
    parser.add_argument("--steps", type=int, default=100, help="steps of a run, if the time suffices")
    parser.add_argument("--limit", type=float, default=500, help="seconds for everything")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer to a held-out question")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.model = options.model.resolve()
    with tempfile.TemporaryDirectory() as name:
        return Proof(options, Path(name)).run()


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
