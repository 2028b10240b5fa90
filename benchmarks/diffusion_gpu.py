"""A training step of diffusion transformers on one device: Headway beside diffusers, eager and compiled.

    python benchmarks/diffusion_gpu.py [--rows NAME ...] [--ways WAY ...] [--json FILE] [--steps 20]

Every way of a row runs in a process of its own, warms up, then times steps of random latents on its own clock, the
device idle before the first and after the last. All train with flow matching, float32 weights and AdamW states, bf16
products, and clip gradients to a norm of 1. Headway's step is the trainer's own (`headway.parallel.apply`, its
objective, optimizer and norm), without determinism. Diffusers' optimizer is torch's fused AdamW. `--rows tiny --device
cpu` is a smoke test. The memory is the largest that the device's allocator held.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

WAN = {"family": "wan", "layers": 30, "dim": 1536, "heads": 12, "hidden": 8960, "text_dim": 4096, "text_tokens": 512}
ROWS: dict[str, dict[str, Any]] = {
    "wan 17,160 tokens": {"model": WAN, "shape": (16, 11, 60, 104), "batch": 1},
    "wan 32,760 tokens": {"model": WAN, "shape": (16, 21, 60, 104), "batch": 1, "recompute": "selective"},
    "dit-xl/2 256": {
        "model": {"family": "dit", "layers": 28, "dim": 1152, "heads": 16, "num_classes": 1000, "base_size": 32},
        "shape": (4, 1, 32, 32), "batch": 256,
    },
    "tiny": {
        "model": WAN | {"layers": 2, "dim": 48, "heads": 2, "hidden": 96, "text_dim": 32, "text_tokens": 16},
        "shape": (16, 2, 8, 8), "batch": 1,
    },
}  # fmt: skip
WAYS = ("headway", "diffusers", "diffusers compiled")
WARM = 4


def main() -> None:
    """Run rows, each way in its own process, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[name for name in ROWS if name != "tiny"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("ROW", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        row, way = options.one
        print(json.dumps(measured(ROWS[row], way, torch.device(options.device), options.steps)))
        return
    results = []
    print(f"{'row':<20}{'way':<20}{'s/step':>9}{'GiB':>8}{'loss':>9}")
    for row in options.rows:
        for way in options.ways:
            command = [sys.executable, __file__, "--one", row, way, "--device", options.device]
            done = subprocess.run([*command, "--steps", str(options.steps)], capture_output=True, text=True)
            if done.returncode:
                print(f"{row:<20}{way:<20}  failed: {done.stderr.strip().splitlines()[-1]}")
                continue
            result = {"row": row, "way": way, **json.loads(done.stdout.splitlines()[-1])}
            results.append(result)
            print(f"{row:<20}{way:<20}{result['seconds']:>9.4f}{result['gib']:>8.1f}{result['loss']:>9.4f}", flush=True)
    if options.json:
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        options.json.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": results}, indent=1))


def measured(row: dict[str, Any], way: str, device: torch.device, steps: int) -> dict[str, float]:
    """Return seconds per step (median of three rounds), memory and the first loss."""
    step = headway_step(row, device) if way == "headway" else diffusers_step(row, device, way.endswith("compiled"))
    losses = [float(step()) for _ in range(WARM)]
    seconds = []
    for _ in range(3):
        wait(device)
        started = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        seconds.append((time.perf_counter() - started) / steps)
    gib = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {"seconds": statistics.median(seconds), "gib": gib, "loss": losses[0]}


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def latents(row: dict[str, Any], device: torch.device) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return noised latents, targets, times and conditions, the same for all ways."""
    from headway.models.noise import TRAINING, draw

    count, rng, model = row["batch"], np.random.default_rng(0), row["model"]
    drawn = draw(0, TRAINING, range(count), row["shape"])
    data, noise = (torch.from_numpy(x).to(device) for x in (rng.normal(size=drawn.noise.shape), drawn.noise))
    times = torch.from_numpy(drawn.uniform_N.astype(np.float32)).to(device)
    t = times.view(-1, 1, 1, 1, 1)
    if model["family"] == "dit":
        conditions = {"label": torch.arange(count, device=device) % model["num_classes"]}
    else:
        states = rng.normal(size=(count, model["text_tokens"], model["text_dim"])).astype(np.float32)
        conditions = {"text": torch.from_numpy(states).to(device)}
    return ((1 - t) * data + t * noise).float(), (noise - data).float(), times, conditions


def headway_step(row: dict[str, Any], device: torch.device) -> Callable[[], Tensor]:
    """Return a training step of Headway."""
    from headway.models import init_weights
    from headway.models.custom import empty_model
    from headway.parallel import World, parallelize_model, total_norm
    from headway.parallel.objective import LABEL, TEXT, TEXT_MASK, TIME, DeviceBatch, SumScale
    from headway.recipe.load import parse_recipe
    from headway.recipe.sample_tokens import with_sample_tokens
    from headway.train.objectives.diffusion import BIN, WEIGHT, DenoisingLoss
    from headway.train.optim import build_optimizer, clip

    channels, frames, height, width = row["shape"]
    text = {"conditioning": "text"} if row["model"]["family"] == "wan" else {}
    media = {"sizes": f"{width}x{height}", "frames": frames}
    train = {"batch": row["batch"], "dtype": "bfloat16", "lr": 1e-4, "recompute": row.get("recompute", "none")}
    values = {
        "model": {**row["model"], **text, "in_channels": 3},
        "data": {"kind": "video" if frames > 1 else "image", "path": "none", "media": media},
        "objective": {"kind": "flow", "bins": 1},
        "train": train,
    }
    recipe = with_sample_tokens(parse_recipe(values, {}, "benchmark"))
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"in_channels": channels})})
    world = World(rank=0, size=1, device=device)
    objective = DenoisingLoss(recipe.objective)
    spread = parallelize_model(empty_model(recipe.model), recipe, world, objective=objective)
    for buffer in spread.model.buffers():
        buffer.zero_()
    init_weights(spread.model, 0)
    optimizer = build_optimizer(spread.model, recipe.train, 0, world)
    inputs, targets, times, conditions = latents(row, device)
    ones = torch.ones(row["batch"], device=device)
    columns = {TIME: times, WEIGHT: ones, BIN: torch.zeros(row["batch"], dtype=torch.int64, device=device)}
    if "label" in conditions:
        columns[LABEL] = conditions["label"]
    else:
        columns |= {TEXT: conditions["text"], TEXT_MASK: torch.ones(conditions["text"].shape[:2], device=device).bool()}
    batch, scale = DeviceBatch(inputs, targets, None, columns), SumScale((1 / row["batch"],), 1 / row["batch"])
    parameters = dict(spread.model.named_parameters())

    def step() -> Tensor:
        values = spread.passes(batch, scale)
        clip(optimizer, parameters.values(), total_norm(parameters, world, spread.borrowed), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return values.sum()

    return step


def diffusers_step(row: dict[str, Any], device: torch.device, compiled: bool) -> Callable[[], Tensor]:
    """Return a training step of diffusers' model in plain PyTorch."""
    import diffusers

    settings, channels = row["model"], row["shape"][0]
    heads = {"num_attention_heads": settings["heads"], "attention_head_dim": settings["dim"] // settings["heads"]}
    with torch.device(device):
        if settings["family"] == "wan":
            model = diffusers.WanTransformer3DModel(
                **heads, in_channels=channels, out_channels=channels, text_dim=settings["text_dim"],
                ffn_dim=settings["hidden"], num_layers=settings["layers"],
            )  # fmt: skip
        else:
            model = diffusers.DiTTransformer2DModel(
                **heads, in_channels=channels, out_channels=channels, num_layers=settings["layers"],
                num_embeds_ada_norm=settings["num_classes"], sample_size=settings["base_size"],
            )  # fmt: skip
    model.train()
    if row.get("recompute") not in (None, "none"):
        model.enable_gradient_checkpointing()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    inputs, targets, times, conditions = latents(row, device)

    def predict() -> Tensor:
        if "text" in conditions:
            return forward(inputs, times * 1000, conditions["text"], return_dict=False)[0]
        return forward(inputs[:, :, 0], times * 1000, conditions["label"], return_dict=False)[0].unsqueeze(2)

    def step() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            predicted = predict()
        loss = (predicted.float() - targets).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    main()
