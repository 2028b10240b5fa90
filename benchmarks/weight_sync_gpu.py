"""How long new weights take from a trainer to a process that samples on the same device: those of `rl.generators`.

    python benchmarks/weight_sync_gpu.py [--out FILE]
    python benchmarks/weight_sync_gpu.py --tiny --device cpu

The Qwen3-0.6B shape in bfloat16. The trainer's weights change; it copies them into the memory that both share, and says
so; the other process reads of every tensor, and answers what it has read, which must be what the trainer has now. Timed
are the copy, the device idle before and after, and the whole until the answer, without the time of reading.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from headway.parallel import World, parallelize_model
from headway.parallel.shared_weights import open_weights, share_weights
from headway.parallel.whole import fill_whole, refresh_whole
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from headway.state import Channel
from headway.train.live_model import compute_dtype, plain_model
from post_training.work import draw
from rl_gpu import SHAPE, TINY_SHAPE, clock

REACH_MS = 5.0


def recipe_of(tiny: bool, device: str) -> Recipe:
    low = {} if device == "cpu" else {"dtype": "bfloat16", "weights": "bfloat16"}
    values: dict[str, Any] = {
        "model": dict(TINY_SHAPE if tiny else SHAPE), "data": {"path": "none"}, "train": {"device": device, **low}
    }  # fmt: skip
    return parse_recipe(values, {}, "benchmark")


def read(tensors: list[torch.Tensor]) -> list[float]:
    """The first element of every tensor."""
    return [float(value) for value in torch.stack([tensor.view(-1)[0].float() for tensor in tensors]).tolist()]


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor for _, tensor in sorted(model.named_parameters())]


def reader(descriptor: int, options: argparse.Namespace) -> None:
    """The process that samples."""
    line, device = Channel(socket.socket(fileno=descriptor)), torch.device(options.device)
    recipe = recipe_of(options.tiny, options.device)
    (start,) = line.receive(None)
    if device.type == "cuda":
        torch.cuda.set_device(0)
    plain = plain_model(recipe)
    open_weights(plain, compute_dtype(recipe, device), start.fields["weights"], start.descriptors, device)
    tensors = tensors_of(plain)
    read(tensors)
    line.send("ready")
    while True:
        for message in line.receive(None):
            if message.kind == "end":
                return
            start_s = time.perf_counter()
            values = read(tensors)
            line.send("read", values=values, seconds=time.perf_counter() - start_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--reader", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader is not None:
        reader(options.reader, options)
        return 0
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    recipe, world = recipe_of(options.tiny, options.device), World(0, 1, device)
    spread = parallelize_model(plain_model(recipe), recipe, world)
    draw(spread.model)
    plain = plain_model(recipe)
    fill_whole(plain, spread, world, compute_dtype(recipe, device))
    weights = share_weights(plain, device)
    ours, theirs = Channel.pair()
    words = [sys.executable, __file__, "--reader", str(theirs.fileno()), "--device", options.device]
    began = clock(device)
    process = subprocess.Popen([*words, *(["--tiny"] if options.tiny else [])], pass_fds=[theirs.fileno()])
    theirs.close()
    ours.send("begin", weights.descriptors, weights=weights.handle())
    assert [message.kind for message in ours.receive(None)] == ["ready"]
    start_s, copies, totals, wrong = clock(device) - began, list[float](), list[float](), 0
    trained = tensors_of(spread.model)
    for _ in range(options.updates + 3):
        with torch.no_grad():
            torch._foreach_add_(trained, 0.25)
        begin = clock(device)
        refresh_whole(plain, spread, world)
        copied = clock(device)
        ours.send("update")
        (message,) = ours.receive(None)
        done = time.perf_counter()
        copies.append(copied - begin)
        totals.append(done - begin - message.fields["seconds"])
        wrong += message.fields["values"] != read(trained)
    ours.send("end")
    process.wait()
    bytes_ = sum(tensor.numel() * tensor.element_size() for tensor in trained)
    result = {
        "bytes": bytes_, "updates": options.updates, "wrong": wrong, "start_s": start_s,
        "copy_ms": statistics.median(copies[3:]) * 1e3, "sync_ms": statistics.median(totals[3:]) * 1e3,
        "worst_ms": max(totals[3:]) * 1e3, "torch": torch.__version__, "device": str(device),
    }  # fmt: skip
    if device.type == "cuda":
        result["device"] = torch.cuda.get_device_name()
    print(
        "| weights | copy, ms | until the other process knows, ms | worst, ms | to reach, ms |\n|---|---|---|---|---|"
    )
    print(f"| {bytes_ / 1e9:.2f} GB | {result['copy_ms']:.2f} | {result['sync_ms']:.2f} | {result['worst_ms']:.2f} "
          f"| {REACH_MS:g} |")  # fmt: skip
    print(f"{wrong} of {options.updates + 3} updates were read wrongly; opened in {start_s:.1f} s")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
