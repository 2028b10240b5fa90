"""What the wrapped step costs over a bare loop on one GPU, in the same process and in turns.

    python benchmarks/parallel_gpu.py [--json FILE]

Headway's step (`ParallelModel.passes`, the norm, clipping, fused AdamW) and the same model in a loop written
by hand take turns of ten steps on the same rows, bfloat16 by autocast. The median of each is printed, and their ratio.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headway.models import empty_decoder, init_weights, initial_weight
from headway.parallel import World, finish_gradients, parallelize_model, total_norm
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from headway.state.tensors import fill
from headway.train.build import build_optimizer

SHAPES = {
    "0.1B": {"layers": 12, "dim": 768, "heads": 12, "vocab_size": 32000},
    "0.5B": {"layers": 24, "dim": 1280, "heads": 10, "kv_heads": 5, "vocab_size": 32000},
}
CASES = [("0.1B", False), ("0.1B", True), ("0.5B", False), ("0.5B", True)]
SEQ, ROWS, TURNS, STEPS, BATCHES = 2048, 16, 4, 10, 8
DEVICE = torch.device("cuda")
Step = Callable[[torch.Tensor], None]


def make_recipe(shape: str, compiled: bool) -> Recipe:
    train = {"batch": ROWS, "dtype": "bfloat16", "compile": compiled, "recompute": "none"}
    return parse_recipe({"model": SHAPES[shape], "data": {"path": "-", "seq": SEQ}, "train": train}, {}, "benchmark")


def ours(recipe: Recipe) -> Step:
    """A step as train/loop.py makes it, without data and record."""
    world = World(0, 1, DEVICE)
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world)
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, initial_weight(recipe.model, name, tuple(parameter.shape), 0))
    optimizer = build_optimizer(spread.model, recipe.train)
    parameters = dict(spread.model.named_parameters())

    def step(tokens: torch.Tensor) -> None:
        spread.passes(DeviceBatch(tokens[:, :-1], tokens[:, 1:]), SumScale.per_label(ROWS * SEQ))
        finish_gradients(parameters, spread.missing)
        norm = total_norm(parameters, world, spread.borrowed)
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def by_hand(recipe: Recipe) -> Step:
    """Nothing in it but the model."""
    decoder = empty_decoder(recipe.model)
    init_weights(decoder, 0)
    decoder = decoder.to(DEVICE)
    if recipe.train.compile:
        for block in decoder.layers:
            block.forward = torch.compile(block.forward)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-4, fused=True)

    def step(tokens: torch.Tensor) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = decoder(tokens[:, :-1], tokens[:, 1:]) / (ROWS * SEQ)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(shape: str, compiled: bool) -> dict[str, object]:
    recipe = make_recipe(shape, compiled)
    steps = {"headway": ours(recipe), "by hand": by_hand(recipe)}
    batches = torch.randint(0, 32000, (BATCHES, ROWS, SEQ + 1), device=DEVICE)
    times = {name: list[float]() for name in steps}
    for turn in range(TURNS + 1):
        for name, step in steps.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for i in range(STEPS):
                step(batches[i % BATCHES])
            torch.cuda.synchronize()
            if turn > 0:  # the first warms up and compiles
                times[name].append((time.perf_counter() - started) / STEPS)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "shape": shape,
        "compile": compiled,
        "headway_s": medians["headway"],
        "by_hand_s": medians["by hand"],
        "ratio": medians["headway"] / medians["by hand"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {ROWS} x {SEQ} tokens a step")
    print("shape  compiled  headway ms  by hand ms  ratio")
    for shape, compiled in CASES:
        row = measure(shape, compiled)
        rows.append(row)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        times = f"{row['headway_s'] * 1e3:12.1f}{row['by_hand_s'] * 1e3:12.1f}{row['ratio']:8.3f}"
        print(f"{shape:6}{compiled!s:>9}{times}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
