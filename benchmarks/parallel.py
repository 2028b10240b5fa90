"""What putting a mesh onto a model costs over bare PyTorch calls that do the same, in the same run.

    python benchmarks/parallel.py [--json FILE]

Two processes on this machine's CPUs. On each mesh Headway's step (`ParallelModel.passes`, the missing sums,
the norm, clipping, AdamW) and a loop written by hand take turns, step by step, on the same model and rows:

    shard      FSDP2 by hand: fully_shard on every block and the model, gradient accumulation without exchange
    replicate  DistributedDataParallel
    tensor     DTensor's parallelize_module: columns, rows, sequence parallel, vocabulary-parallel embedding and head
    pipeline   torch.distributed.pipelining's Schedule1F1B over two hand-cut halves

The ratio of the medians is printed; times alone say little on a machine that others use too.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from headway.models import Decoder, empty_decoder, init_weights, initial_weight
from headway.parallel import World, finish_gradients, make_mesh, parallelize_model, total_norm
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from headway.state.tensors import fill
from headway.train.build import build_optimizer

MODEL = {"layers": 4, "dim": 192, "heads": 6, "vocab_size": 2048, "tie_embeddings": False}
SEQ, BATCH, MICROBATCH, STEPS, WARM_UP = 64, 8, 2, 20, 3
MESHES = {
    "shard": {"shard": 2},
    "replicate": {"replicate": 2, "shard": 1},
    "tensor": {"tensor": 2, "shard": 1},
    "pipeline": {"pipeline": 2, "shard": 1},
}
TOKENS = BATCH * SEQ
Step = Callable[[], None]


def make_recipe(mesh: dict[str, int]) -> Recipe:
    train = {"batch": BATCH, "microbatch": MICROBATCH}
    values = {"model": MODEL, "data": {"path": "-", "seq": SEQ}, "train": train, "parallel": mesh}
    return parse_recipe(values, {}, "benchmark")


def rows(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 2048, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    each = BATCH // world.data.size
    mine = tokens[each * world.data.rank : each * (world.data.rank + 1)]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


# -- ours


def ours(recipe: Recipe, world: World) -> Step:
    """A step as train/loop.py makes it, without its record."""
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world)
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, initial_weight(recipe.model, name, tuple(parameter.shape), 0))
    optimizer = build_optimizer(spread.model, recipe.train)
    inputs, labels = rows(world)
    parameters = dict(spread.model.named_parameters())

    def step() -> None:
        spread.passes(DeviceBatch(inputs, labels), SumScale.per_label(TOKENS))
        finish_gradients(parameters, spread.missing)
        norm = total_norm(parameters, world, spread.borrowed)
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# -- by hand


def by_hand(kind: str, recipe: Recipe, world: World) -> Step:
    """The same step in plain PyTorch."""
    model = empty_decoder(recipe.model)
    init_weights(model, 0)
    inputs, labels = rows(world)
    makers = {"shard": sharded, "replicate": replicated, "tensor": parallelized, "pipeline": pipelined}
    passes, model = makers[kind](model, inputs, labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step() -> None:
        passes()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def sharded(model: Decoder, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[Step, nn.Module]:
    mesh = init_device_mesh("cpu", (2,))
    for block in (*model.layers, model):
        fully_shard(block, mesh=mesh)

    def passes() -> None:
        for low in range(0, len(inputs), MICROBATCH):
            model.set_requires_gradient_sync(low + MICROBATCH >= len(inputs))
            (2 * model(inputs[low : low + MICROBATCH], labels[low : low + MICROBATCH]) / TOKENS).backward()

    return passes, model


def replicated(model: Decoder, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[Step, nn.Module]:
    wrapped = nn.parallel.DistributedDataParallel(model)

    def passes() -> None:
        for low in range(0, len(inputs), MICROBATCH):
            wrapped.require_backward_grad_sync = low + MICROBATCH >= len(inputs)
            (2 * wrapped(inputs[low : low + MICROBATCH], labels[low : low + MICROBATCH]) / TOKENS).backward()

    return passes, model


class Plain(nn.Module):
    """The decoder with a head that is called as a module, as parallelize_module needs it."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.embed, self.layers, self.norm, self.head = model.embed, model.layers, model.norm, model.head
        self.rotary = model.rotary

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        table, x = self.rotary(tokens), self.embed(tokens)
        for block in self.layers:
            x = block(x, table)
        return self.head(self.norm(x))


def parallelized(model: Decoder, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[Step, nn.Module]:
    mesh, plain = init_device_mesh("cpu", (2,)), Plain(model)
    parallelize_module(plain, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    })  # fmt: skip
    for block in plain.layers:
        gathered = {"desired_input_layouts": (Replicate(), None, None), "input_layouts": (Shard(1), None, None)}
        parallelize_module(block, mesh, {
            "attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**gathered),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        })  # fmt: skip

    def passes() -> None:
        for low in range(0, len(inputs), MICROBATCH):
            with loss_parallel():
                logits = plain(inputs[low : low + MICROBATCH]).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, labels[low : low + MICROBATCH].flatten(), reduction="sum")
                (loss / TOKENS).backward()

    return passes, plain


class Half(nn.Module):
    """Half of the decoder's blocks, with what comes before or after them."""

    def __init__(self, model: Decoder, last: bool) -> None:
        super().__init__()
        middle = len(model.layers) // 2
        self.rotary = model.rotary
        self.layers = model.layers[middle:] if last else model.layers[:middle]
        self.embed = None if last else model.embed
        self.norm, self.head, self.loss = (model.norm, model.head, model.loss) if last else (None, None, None)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        table = self.rotary(x)
        x = x if self.embed is None else self.embed(x)
        for block in self.layers:
            x = block(x, table)
        return x if self.norm is None else self.loss(self.norm(x), self.head.weight, labels).reshape(1)


def pipelined(model: Decoder, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[Step, nn.Module]:
    rank = dist.get_rank()
    half = Half(model, last=rank == 1)
    stream = torch.empty((MICROBATCH, SEQ, MODEL["dim"]), device="meta", requires_grad=True)
    tokens = torch.empty((MICROBATCH, SEQ), dtype=torch.int64, device="meta")
    stage = PipelineStage(
        half, rank, 2, torch.device("cpu"),
        input_args=stream if rank else tokens,
        output_args=torch.empty(1, device="meta", requires_grad=True) if rank else stream,
    )  # fmt: skip
    schedule = Schedule1F1B(stage, BATCH // MICROBATCH, lambda loss, _: loss.sum() / TOKENS, scale_grads=False)

    def passes() -> None:
        schedule.step(*([] if rank else [inputs]), target=labels if rank else None, labels=labels)

    return passes, half


# -- measured


def measure(rank: int, store: str, kind: str, folder: str) -> None:
    """One worker: ours and the other take turns."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    recipe = make_recipe(MESHES[kind])
    world = make_mesh(rank, 2, torch.device("cpu"), recipe.parallel.sizes(2))
    steps = {"headway": ours(recipe, world), "by hand": by_hand(kind, recipe, world)}
    times = {name: list[float]() for name in steps}
    for turn in range(STEPS + WARM_UP):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - started)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def compare(kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(partial(measure), args=(f"{folder}/store", kind, folder), nprocs=2)
        times = json.loads(Path(folder, "times.json").read_text())
    medians = {name: statistics.median(found) for name, found in times.items()}
    best = {name: min(found) for name, found in times.items()}
    return {
        "mesh": kind,
        "headway_s": medians["headway"],
        "by_hand_s": medians["by hand"],
        "ratio": medians["headway"] / medians["by hand"],
        "ratio_of_best": best["headway"] / best["by hand"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=MESHES, action="append")
    options = parser.parse_args()
    found = []
    print("mesh           headway ms   by hand ms   ratio   of the best steps")
    for kind in options.only or MESHES:
        row = compare(kind)
        found.append(row)
        times = f"{row['headway_s'] * 1e3:11.1f}{row['by_hand_s'] * 1e3:13.1f}"
        print(f"{kind + ' 2':14}{times}{row['ratio']:8.3f}{row['ratio_of_best']:14.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
