"""Load the state saved by each of many meshes into each of them, and write the table of docs/concepts/state.md.

python docs/reshards.py      some minutes on two cores; exits with 1 if a pair is not equal bit for bit

Every mesh trains a small model for a few steps, and its agent saves the state. Then the workers of every mesh load each
of these states and write what they hold to files, which are compared with the saved ones. Those are read here with
`json`, NumPy and the safetensors library alone, so that Headway's reader is not checked by itself. PyTorch
(`full_tensor`), not Headway's layout, determines where a worker's elements belong in the full tensor.
"""

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch.distributed.tensor import DTensor

from headway.agent import new_run, supervise_run
from headway.agent.parity import describe
from headway.agent.workers.env import worker_environment
from headway.agent.workers.zygote import ZygoteClient
from headway.cli.mesh import parse_layout
from headway.data import BuildOptions, build_dataset
from headway.models.custom import empty_model
from headway.parallel import World, make_mesh, parallelize_model
from headway.recipe import Parallel, Recipe
from headway.recipe.load import parse_recipe
from headway.state import Box, digest_box, find_checkpoint, state_digest
from headway.state.tensors import ModelShare, load_state, named_state, pieces
from headway.track import read_recipe
from headway.train.optim import build_optimizer

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "concepts" / "state.md"
BEGIN, END = "<!-- made by docs/reshards.py: begin -->", "<!-- made by docs/reshards.py: end -->"
MESHES = (
    "shard=1",
    "shard=2",
    "replicate=2",
    "tensor=2",
    "pipeline=2",
    "pipeline=2,schedule=interleaved",
    "shard=3",
    "shard=4",
    "tensor=4",
    "replicate=2,shard=2",
    "shard=2,tensor=2",
    "shard=2,pipeline=2",
    "tensor=2,pipeline=2",
)
# No size is divisible by 3, and the vocabulary by nothing. Embedding and head are one tensor, which both ends of a
# pipeline hold; there are fewer KV heads than workers of the largest tensor axis, which replicate them.
MODEL = {"layers": 4, "dim": 40, "heads": 4, "kv_heads": 2, "hidden": 56, "vocab_size": 301, "qkv_bias": True}
TRAIN = {"batch": 12, "microbatch": 2, "lr": 1e-2, "warmup_steps": 1, "device": "cpu"}
PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "headway.agent.parity", "headway.data", "headway.train.build"]
"""What every worker imports: done once, in the process from which they are forked."""
NUMBERS = 1 << 20
"""Size of the range of numbers per rank that identify elements; float32 can represent those of 16 ranks."""

Arrays = Mapping[str, NDArray[Any]]
Boxes = Sequence[tuple[tuple[int, ...], NDArray[Any]]]
"""Boxes of one tensor: start and elements of each."""


@dataclass(frozen=True)
class Saved:
    """A mesh and the state that it saved."""

    mesh: str
    """In words: shard 2 x tensor 2."""
    workers: int
    recipe: Recipe
    """With the keys that the plan filled in."""
    state: Path


@dataclass(frozen=True)
class Loaded:
    """What the workers of a mesh hold after loading a state."""

    parts: Mapping[str, Boxes]
    """What they would save of each tensor."""
    wrong: Sequence[str]
    """Tensors that are wrong on a worker, including replicas that another worker saves."""


def main() -> int:
    """Save on every mesh, load on every mesh, write the page."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = root / "json-package"
        build_dataset(data, [f"{Path(json.__file__).parent}/*.py"], BuildOptions(vocab_size=300))
        saved = train(data, root)
        assert len({digest_in(mesh.state) for mesh in saved}) == len(saved), "two states are equal"
        states = [mesh.state for mesh in saved]
        differences = {mesh.mesh: load_states(mesh, states, root / "loaded") for mesh in saved}
        tensors = len(read_checkpoint(saved[0].state))
    for target, by_source in differences.items():
        for source, lines in zip(saved, by_source, strict=True):
            if lines:
                print(f"{source.mesh} -> {target}:", *lines[:20], sep="\n  ")
    write(PAGE, "\n".join(table(list(differences), list(differences.values()), tensors)))
    return 1 if any(lines for by_source in differences.values() for lines in by_source) else 0


def report(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


# -- saving


def recipe_on(mesh: str, data: Path, number: int) -> Recipe:
    """Return the recipe of one mesh; each has its own weights and steps, so that no two states are equal."""
    values = {
        "seed": number,
        "model": MODEL,
        "data": {"path": str(data), "seq": 16},
        "train": TRAIN | {"steps": 3 + number % 3},
        "checkpoint": {"every_steps": 0},
        "parallel": parse_layout(mesh).model_dump(),
    }
    return parse_recipe(values, {}, "docs/reshards.py")


def mesh_name(mesh: str) -> str:
    """Return the name of a mesh in the table."""
    return describe(parse_layout(mesh), 1)


def train(data: Path, root: Path) -> list[Saved]:
    """Train and save on every mesh."""
    attempts = [new_run(recipe_on(mesh, data, i), root / "runs", name=f"mesh-{i}") for i, mesh in enumerate(MESHES)]
    attempts = [attempt.model_copy(update={"threads": 1}) for attempt in attempts]
    zygote = ZygoteClient.start(root / "zygote.log", worker_environment(attempts[0]))
    saved = []
    try:
        for mesh, attempt in zip(MESHES, attempts, strict=True):
            report(f"{mesh_name(mesh)}: trains and saves")
            outcome = supervise_run(attempt, warm=zygote)
            if outcome.state != "finished":
                raise SystemExit(f"{mesh_name(mesh)}: {outcome.reason}")
            state = find_checkpoint(attempt.folder.checkpoints)
            saved.append(Saved(mesh_name(mesh), attempt.workers, read_recipe(attempt.folder), state))
    finally:
        zygote.close()
    return saved


# -- loading


def load_states(mesh: Saved, states: Sequence[Path], folder: Path) -> list[list[str]]:
    """Have the workers of one mesh load every state; return the differences per state."""
    report(f"{mesh.mesh}: loads {len(states)} states")
    folder.mkdir()
    arguments = (mesh.workers, mesh.recipe, states, folder)
    torch.multiprocessing.start_processes(work, arguments, mesh.workers, start_method="forkserver")
    differences = [compare(state, read_loaded(folder, number)) for number, state in enumerate(states)]
    shutil.rmtree(folder)
    return differences


def work(rank: int, workers: int, recipe: Recipe, states: Sequence[Path], folder: Path) -> None:
    """Run one worker of a mesh, from the rendezvous to the last state."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # It warns that full_tensor is slow on nested shards, which is fine here.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    load_all(rank, workers, recipe, states, folder)
    dist.barrier()
    dist.destroy_process_group()


def load_all(rank: int, workers: int, recipe: Recipe, states: Sequence[Path], folder: Path) -> None:
    """Build this worker's part of a mesh as the trainer does; load each state into it and write out the result."""
    device = torch.device("cpu")
    sizes = (recipe.parallel or Parallel()).sizes(workers)
    world = make_mesh(rank, workers, device, sizes) if workers > 1 else World(rank=0, size=1, device=device)
    parallel = parallelize_model(empty_model(recipe.model), recipe, world)
    held = ModelShare(world.rank, world.stage, parallel.borrowed, parallel.names)
    optimizer = build_optimizer(parallel.model, recipe.train)
    live = named_state(parallel.model, optimizer, held)
    positions = {name: element_positions(tensor, rank) for name, tensor in live.items()}
    for number, state in enumerate(states):
        fill_with_nan(live)
        load_state(state, parallel.model, optimizer, held)
        saved = read_checkpoint(state)
        mine = {name: saved[name].reshape(-1)[positions[name]] for name in live}
        wrong = differing(mine, {name: local(tensor).numpy().reshape(-1) for name, tensor in live.items()})
        own = pieces(live, held)
        note = {"starts": {piece.name: piece.start for piece in own}, "wrong": [f"{name} on {rank}" for name in wrong]}
        arrays = {piece.name: piece.data.reshape(piece.local_shape).view(piece.dtype) for piece in own}
        save_file(arrays, folder / f"{number}-{rank}.safetensors", {"note": json.dumps(note)})


@torch.no_grad()
def element_positions(tensor: torch.Tensor, rank: int) -> NDArray[np.int64]:
    """Return the flat index of each of this worker's elements in the full tensor, found by numbering them."""
    if not isinstance(tensor, DTensor):
        return np.arange(tensor.numel())
    mine = local(tensor)
    assert mine.numel() <= NUMBERS, "too large a tensor to number its elements"
    mine.copy_((rank * NUMBERS + torch.arange(mine.numel())).reshape(mine.shape))
    numbers = tensor.full_tensor().numpy().reshape(-1).astype(np.int64)
    positions = np.flatnonzero(numbers // NUMBERS == rank)
    return positions[np.argsort(numbers[positions])]


@torch.no_grad()
def fill_with_nan(state: Mapping[str, torch.Tensor]) -> None:
    """Erase what was loaded before, so that only the next load can make it right."""
    for tensor in state.values():
        local(tensor).fill_(float("nan"))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's local part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- comparing


@cache
def read_checkpoint(folder: Path) -> Arrays:
    """Return every tensor of a checkpoint, assembled from the pieces in its manifest."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    files = {name: load_file(folder / name) for name in manifest["files"]}
    tensors = {}
    for name, entry in manifest["tensors"].items():
        boxes = [(tuple(piece["start"]), files[piece["file"]][name]) for piece in entry["pieces"]]
        tensors[name] = assemble(entry["shape"], boxes)
    return tensors


def read_loaded(folder: Path, number: int) -> Loaded:
    """Return what all workers of a mesh wrote for one state."""
    parts: dict[str, list[tuple[tuple[int, ...], NDArray[Any]]]] = {}
    wrong = list[str]()
    for path in sorted(folder.glob(f"{number}-*.safetensors")):
        with safe_open(path, "numpy") as file:
            note = json.loads(file.metadata()["note"])
            for name, start in note["starts"].items():
                parts.setdefault(name, []).append((tuple(start), file.get_tensor(name)))
            wrong += note["wrong"]
    return Loaded(parts, wrong)


def assemble(shape: Sequence[int], boxes: Boxes) -> NDArray[Any]:
    """Return a tensor from its boxes, which must cover each element exactly once."""
    tensor = np.zeros(shape, boxes[0][1].dtype if boxes else np.float32)
    times = np.zeros(shape, np.uint8)
    for start, box in boxes:
        region = tuple(slice(first, first + size) for first, size in zip(start, box.shape, strict=True))
        tensor[region] = box
        times[region] += 1
    if (times != 1).any():
        raise ValueError(f"{np.count_nonzero(times != 1)} of {times.size} elements are not covered exactly once")
    return tensor


def compare(state: Path, loaded: Loaded) -> list[str]:
    """Return the differences between a saved state and what a mesh loaded; empty if no bit differs."""
    saved = read_checkpoint(state)
    differences = [f"{name}: not in the checkpoint" for name in loaded.parts if name not in saved]
    for name, tensor in saved.items():
        try:
            held = assemble(tensor.shape, loaded.parts.get(name, []))
        except ValueError as error:
            differences.append(f"{name}: {error}")
        else:
            differences += [f"{name}: other bits" for _ in differing({name: tensor}, {name: held})]
    differences += [f"{name}: other bits" for name in loaded.wrong]
    if not differences and digest_of(saved, loaded) != digest_in(state):
        differences.append("the digest")
    return differences


def differing(saved: Arrays, loaded: Arrays) -> list[str]:
    """Return the tensors whose dtype, shape or bytes differ from the saved ones."""
    pairs = ((name, saved[name], tensor) for name, tensor in loaded.items())
    return [name for name, a, b in pairs if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes())]


def digest_in(state: Path) -> str:
    """Return the digest in a checkpoint's manifest."""
    return str(json.loads((state / "manifest.json").read_bytes())["digest"])


def digest_of(saved: Arrays, loaded: Loaded) -> str:
    """Return the digest of what a mesh holds, from its boxes."""
    entries = []
    for name, parts in loaded.parts.items():
        shape, dtype = saved[name].shape, str(saved[name].dtype)
        boxes = [(Box(start, part.shape), part.view(f"<u{part.itemsize}")) for start, part in parts]
        entries.append((name, dtype, shape, sum(digest_box(bits, shape, box) for box, bits in boxes) % 2**64))
    return state_digest(entries)


# -- the page


def table(meshes: Sequence[str], differences: Sequence[Sequence[Sequence[str]]], tensors: int) -> Iterator[str]:
    """Yield one row per mesh that saved and one column, by the number of its row, per mesh that loaded."""
    yield f"{tensors} tensors in each state:"
    yield ""
    yield f"| | saved by | {' | '.join(str(i) for i in range(1, len(meshes) + 1))} |"
    yield f"|---:|---|{':-:|' * len(meshes)}"
    for row, mesh in enumerate(meshes):
        names = [{line.split()[0] for line in by_source[row]} for by_source in differences]  # on any worker
        cells = [f"{len(wrong)} differ" if wrong else "=" for wrong in names]
        yield f"| {row + 1} | {mesh} | {' | '.join(cells)} |"
    yield ""


def write(page: Path, text: str) -> None:
    """Replace the text between the page's marks."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    sys.exit(main())
