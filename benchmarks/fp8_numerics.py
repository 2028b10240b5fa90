"""Whether float8 training ends where bfloat16 does: a 0.3B decoder, three seeds, 1,000 steps, on one GPU.

    python benchmarks/fp8_numerics.py --data DATASET [--ways bf16 tensorwise rowwise e4m3] [--seeds 3] [--first-seed 0]
        [--steps 1000] [--json FILE]

Every way trains the same model from the same weights on the same rows, by the trainer's own step (compiled blocks,
AdamW, warm-up and cosine). A way passes if its mean loss of the last 100 steps, over the seeds, is within 0.5 % of
bfloat16's, or within the spread of bfloat16's seeds (largest minus smallest), whichever is more. DATASET is a folder of
`headway data build`. `--seq 1024 --batch 2` is for a device that is scarce.
"""

import argparse
import fcntl
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.data import open_dataset
from headway.models import empty_decoder
from headway.parallel import World, parallelize_model, total_norm
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from headway.train.cuda_graphs import passes_of
from headway.train.optim import build_optimizer, clip, set_step
from headway.train.schedule import learning_rate

SHAPE = {"layers": 24, "dim": 1024, "heads": 16, "kv_heads": 16, "hidden": 2816, "tie_embeddings": True}
TINY = {"layers": 2, "dim": 64, "heads": 2, "kv_heads": 2, "hidden": 128, "tie_embeddings": True}
WAYS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "tensorwise": {},
    "rowwise": {"scaling": "rowwise"},
    "e4m3": {"gradients": "e4m3"},
}
LAST = 100
WITHIN = 0.005


def main() -> None:
    """Train every way with every seed; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=["bf16", "tensorwise", "rowwise"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="To run seeds that another run left out.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="A model for a CPU, to try the script.")
    parser.add_argument("--lock", type=Path, help="Wait after the first step while train_gpu.py holds this file.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = open_dataset(options.data).tokens[0]
    runs = list[dict[str, Any]]()
    for way in options.ways:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            began = time.perf_counter()
            losses = train(way, seed, np.asarray(tokens), options)
            runs.append({"way": way, "seed": seed, "last": statistics.mean(losses[-LAST:]), "losses": losses[::10]})
            print(f"{way:12} seed {seed}  {runs[-1]['last']:.4f}  {time.perf_counter() - began:.0f} s", flush=True)
            if options.json:
                options.json.write_text(json.dumps({"runs": runs, "verdicts": verdicts(runs)}, indent=1) + "\n")
    for verdict in verdicts(runs):
        print(
            f"{verdict['way']:12} {verdict['mean']:.4f}, {verdict['off']:+.2%} of bf16's, "
            f"allowed {verdict['allowed']:.2%}: {'within' if verdict['passes'] else 'NOT within'}"
        )


def verdicts(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare every way with bfloat16."""
    ends = {way: [run["last"] for run in runs if run["way"] == way] for way in {run["way"] for run in runs}}
    if "bf16" not in ends:
        return []
    mean = statistics.mean(ends["bf16"])
    allowed = max(WITHIN, (max(ends["bf16"]) - min(ends["bf16"])) / mean)
    found = []
    for way in (way for way in WAYS if way in ends and way != "bf16"):
        off = statistics.mean(ends[way]) / mean - 1
        found.append({"way": way, "mean": statistics.mean(ends[way]), "off": off, "allowed": allowed,
                      "passes": abs(off) <= allowed})  # fmt: skip
    return found


def train(way: str, seed: int, tokens: np.ndarray, options: argparse.Namespace) -> list[float]:
    """Return the loss of every step."""
    recipe = recipe_of(way, seed, int(tokens.max()) + 1, options)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    world = World(0, 1, device)
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world)
    draw(spread.model, seed)
    optimizer = build_optimizer(spread.model, recipe.train, seed, world)
    parameters, passes = dict(spread.model.named_parameters()), passes_of(spread, recipe, world)
    losses = list[torch.Tensor]()
    for step, rows in enumerate(batches(tokens, seed, options), 1):
        set_step(optimizer.param_groups, step, learning_rate(recipe.train, step))
        batch = DeviceBatch(rows[:, :-1].to(device).contiguous(), rows[:, 1:].to(device).contiguous())
        loss = passes(batch, SumScale.per_label(options.batch * options.seq))
        losses.append(loss.detach().clone())
        if options.lock and step == 1:
            with options.lock.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
        clip(optimizer, parameters.values(), total_norm(parameters, world), recipe.train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if spread.float8 is not None:
            spread.float8.forget()
    return [float(loss) for loss in losses]


def draw(model: torch.nn.Module, seed: int) -> None:
    """Draw weights on the device: the same for every way of a seed."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)


def recipe_of(way: str, seed: int, vocabulary: int, options: argparse.Namespace) -> Recipe:
    """Float32 weights and moments, so that the ways differ in their products alone."""
    train: dict[str, Any] = {"steps": options.steps, "batch": options.batch, "lr": 6e-4, "dtype": "bfloat16"}
    low = {} if WAYS[way] is None else {"fp8": WAYS[way]}
    model = (TINY if options.tiny else SHAPE) | {"vocab_size": -(-vocabulary // 128) * 128}
    data = {"path": str(options.data), "seq": options.seq}
    return parse_recipe({"model": model, "data": data, "seed": seed, "train": train | low}, {}, "numerics")


def batches(tokens: np.ndarray, seed: int, options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield rows of windows at random places: the same for every way of a seed."""
    generator = np.random.default_rng(seed)
    for _ in range(options.steps):
        begins = generator.integers(0, len(tokens) - options.seq - 1, options.batch)
        rows = np.stack([tokens[begin : begin + options.seq + 1] for begin in begins])
        yield torch.from_numpy(rows.astype(np.int64))


if __name__ == "__main__":
    main()
