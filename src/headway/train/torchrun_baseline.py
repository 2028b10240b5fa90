"""A typical torchrun training loop, as a baseline for Headway's recovery: `headway chaos --beside`.

torchrun ... -m headway.train.torchrun_baseline FOLDER

Model, sharding, data and update are those of a Headway run of the same recipe. Fault tolerance is what PyTorch offers:
torchrun restarts all workers when one dies, torch.distributed.checkpoint writes a checkpoint every N steps, a file
names the last complete one, and each start resumes from it. FOLDER has recipe.json and faults.json; each worker records
when its process started and when each step ended.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from headway.data.corpus import open_corpus
from headway.models.custom import empty_model
from headway.parallel import ParallelModel, World, finish_gradients, make_mesh, parallelize_model, total_norm
from headway.parallel.objective import SumScale
from headway.recipe import FaultPlan, Parallel, Recipe
from headway.state.tensors import ModelShare
from headway.track import RunFolder
from headway.train.build import seed_everything
from headway.train.draw_weights import draw_weights
from headway.train.fault_injector import WorkerFaultInjector
from headway.train.feed import DeviceFeed
from headway.train.optim import build_optimizer, freeze
from headway.train.schedule import learning_rate


@dataclass(frozen=True)
class BaselineParts:
    """Everything the loop uses."""

    recipe: Recipe
    world: World
    spread: ParallelModel
    optimizer: torch.optim.Optimizer
    feed: DeviceFeed
    faults: WorkerFaultInjector
    folder: Path


def main(folder: Path) -> None:
    """Join, build, resume, train to the end."""
    recipe = Recipe.model_validate_json((folder / "recipe.json").read_bytes())
    with (folder / f"rank-{os.environ['RANK']}.jsonl").open("a", buffering=1) as record:
        note(record, "start", at_ns=process_start_ns())
        dist.init_process_group("gloo")
        train(build(recipe, folder), record)
        dist.destroy_process_group()


def build(recipe: Recipe, folder: Path) -> BaselineParts:
    """Build a worker's model, optimizer and data."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    world = World(0, 1, device)
    if size > 1:
        world = make_mesh(rank, size, device, (recipe.parallel or Parallel()).sizes(size))
    seed_everything(recipe.seed, world.data.rank)
    model = empty_model(recipe.model)
    freeze(model, recipe.train)
    spread = parallelize_model(model, recipe, world)
    held = ModelShare(world.rank, world.stage, spread.borrowed, spread.names)
    draw_weights(spread.model, recipe, held, RunFolder(folder))
    corpus = open_corpus(recipe)
    plan = FaultPlan.model_validate_json((folder / "faults.json").read_bytes())
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    return BaselineParts(
        recipe=recipe,
        world=world,
        spread=spread,
        optimizer=build_optimizer(spread.model, recipe.train),
        feed=DeviceFeed(corpus.loader(corpus.reader(), world.data.rank, world.data.size), device),
        faults=WorkerFaultInjector(plan, rank, attempt, spread.model, folder / "faults"),
        folder=folder,
    )


def train(peer: BaselineParts, record: TextIO) -> None:
    """Train from the last complete checkpoint."""
    recipe, world, spread, optimizer = peer.recipe, peer.world, peer.spread, peer.optimizer
    parameters = dict(spread.model.named_parameters())
    first = load(peer)
    note(record, "resumed", step=first)
    for step in range(first + 1, recipe.train.steps + 1):
        peer.faults.reach("start", step)
        peer.faults.reach("data", step)
        rows, trained, _ = peer.feed.read((step - 1) * recipe.train.batch)
        scale = SumScale.per_label(int(world.sum(torch.tensor([trained]))))
        peer.faults.reach("compute", step)
        loss = spread.passes(rows, scale)
        peer.faults.reach("collective", step)
        finish_gradients(parameters, spread.missing)
        norm = total_norm(parameters, world, spread.borrowed)
        if recipe.train.clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters.values(), recipe.train.clip, norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe.train, step)
        peer.faults.reach("optimizer", step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        note(record, "step", step=step, loss=float(world.sum(loss)))
        every = recipe.checkpoint.every_steps
        if isinstance(every, int) and every and step % every == 0:
            save(peer, step)


def save(peer: BaselineParts, step: int) -> None:
    """Write a checkpoint, then name it as the one to resume from."""
    model, optimizer = get_state_dict(peer.spread.model, peer.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=peer.folder / f"step-{step}")
    peer.faults.reach("saved", step)
    dist.barrier()
    if dist.get_rank() == 0:
        latest = peer.folder / "latest.partial"
        latest.write_text(str(step))
        latest.replace(peer.folder / "latest")
    dist.barrier()


def load(peer: BaselineParts) -> int:
    """Resume from the named checkpoint; return its step, 0 if there is none."""
    latest = peer.folder / "latest"
    step = int(latest.read_text()) if latest.exists() else 0
    if step:
        model, optimizer = get_state_dict(peer.spread.model, peer.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=peer.folder / f"step-{step}")
        set_state_dict(
            peer.spread.model, peer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    return step


def note(record: TextIO, kind: str, at_ns: int | None = None, **fields: Any) -> None:
    """Write an event with its monotonic time."""
    record.write(json.dumps({"kind": kind, "at_ns": at_ns or time.monotonic_ns(), **fields}) + "\n")


def process_start_ns() -> int:
    """Return when this process started; the kernel counts ticks since boot."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return ticks * 10**9 // os.sysconf("SC_CLK_TCK") - since_boot


if __name__ == "__main__":
    main(Path(sys.argv[1]))
