"""Whether post-training teaches a real model something: SFT, LoRA and DPO of a chat model on grade-school mathematics.

    python benchmarks/post_training_learning.py MODEL GSM8K [--rows 2000] [--steps 60] [--batch 16] [--seq 1024]
        [--only sft,lora,dpo] [--json FILE]

MODEL is a folder with a chat template, such as SmolLM2-135M-Instruct; GSM8K a folder with train.jsonl (question and
answer). SFT trains on questions and answers; DPO prefers the answer of a question over that of another one. The loss
on held-out chats, and the margin and accuracy on held-out pairs, are shown from before the first step to the last.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def chats_and_pairs(file: Path, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()][:count]
    draw = random.Random(0)
    chats, pairs = [], []
    for number, row in enumerate(rows):
        prompt = [{"role": "user", "content": row["question"]}]
        chats.append({"messages": [*prompt, {"role": "assistant", "content": row["answer"]}]})
        other = rows[(number + draw.randrange(1, len(rows))) % len(rows)]["answer"]
        pairs.append({
            "prompt": prompt,
            "chosen": [{"role": "assistant", "content": row["answer"]}],
            "rejected": [{"role": "assistant", "content": other}],
        })  # fmt: skip
    return chats, pairs


def headway(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "headway", *words], check=True, stdout=subprocess.DEVNULL)


def held_out(runs: Path, run: str) -> list[dict[str, Any]]:
    """The evaluations of a run, by step."""
    lines = [line for file in sorted((runs / run / "events").glob("*-rank-0.jsonl")) for line in file.open()]
    events = [json.loads(line) for line in lines if '"kind":"eval"' in line]
    return [{key: event[key] for key in ("step", "loss", "accuracy", "margin") if key in event} for event in events]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--only", default="sft,lora,dpo", help="methods, by commas")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = dict(
            zip(("chats", "pairs"), chats_and_pairs(arguments.gsm8k / "train.jsonl", arguments.rows), strict=True)
        )
        for kind, entries in rows.items():
            file = folder / f"{kind}.jsonl"
            file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
            headway("data", "build", str(folder / kind), str(file), "--chat", arguments.model)
        results = {}
        for run, kind, init, more in (
            ("sft", "sft", arguments.model, {"train.lr": 2e-5}),
            ("lora", "sft", arguments.model, {"train.lr": 5e-4, "lora.rank": 16, "lora.alpha": 32}),
            ("dpo", "dpo", arguments.model, {"train.lr": 5e-6}),
        ):
            if run not in arguments.only.split(","):
                continue
            settings: dict[str, Any] = {
                "model.init": init,
                "objective.kind": kind,
                "data.path": str(folder / ("pairs" if kind == "dpo" else "chats")),
                "data.seq": arguments.seq,
                "data.holdout": 0.05,
                "train.steps": arguments.steps,
                "train.batch": arguments.batch,
                "train.warmup_steps": arguments.steps // 10,
                "train.weight_decay": 0.0,
                "eval.every_steps": max(1, arguments.steps // 4),
            } | more
            recipe, runs = folder / f"{run}.toml", folder / "runs"
            recipe.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
            before = ["--set", "train.steps=1", "--set", "train.warmup_steps=0", "--set", "train.lr=1e-12"]
            headway("train", str(recipe), "--name", f"{run}-before", "--runs", str(runs), *before)
            headway("train", str(recipe), "--name", run, "--runs", str(runs))
            results[run] = [held_out(runs, f"{run}-before")[0] | {"step": 0}, *held_out(runs, run)]
            print(f"{run}, held-out rows")
            for row in results[run]:
                print("  " + "  ".join(f"{key} {value:g}" for key, value in row.items()), flush=True)
    if arguments.json is not None:
        facts = {
            "rows": arguments.rows,
            "steps": arguments.steps,
            "batch": arguments.batch,
            "seq": arguments.seq,
            "held_out": results,
        }
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
