"""Loads what each of many meshes has saved into each of them, and writes the table of docs/concepts/state.md.

python docs/reshards.py      some minutes on two cores; exits 1 when a pair is not equal bit for bit

Every mesh trains a small model for a few steps, and its agent saves the state. Then the workers of every mesh load each
of these states and write down what they hold, which is compared with the files that were saved. Those are read here
with `json`, NumPy and the safetensors library alone, so that Headway's reading is not checked by itself. Where a
worker's elements belong in the whole tensor, PyTorch tells (`full_tensor`), and not Headway's idea of a layout.
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
from headway.parallel import World, make_mesh, parallelize_model
from headway.recipe import Parallel, Recipe
from headway.recipe.load import parse_recipe
from headway.state import Box, digest_box, find_checkpoint, state_digest
from headway.state.tensors import ModelShare, load_state, named_state, pieces
from headway.track import read_recipe
from headway.train.build import build_optimizer, empty_model

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
# Sizes of which 3 divides none, and a vocabulary that nothing divides. Embedding and head are one tensor, which both
# ends of a pipeline hold; there are fewer key heads than workers of the largest tensor axis, which hold them whole.
MODEL = {"layers": 4, "dim": 40, "heads": 4, "kv_heads": 2, "hidden": 56, "vocab_size": 301, "qkv_bias": True}
TRAIN = {"batch": 12, "microbatch": 2, "lr": 1e-2, "warmup_steps": 1, "device": "cpu"}
PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "headway.agent.parity", "headway.data", "headway.train.build"]
"""What every worker imports: done once, in the process that they are forked from."""
NUMBERS = 1 << 20
"""For the elements of one rank, to see where they lie; float32 tells those of 16 ranks apart."""

Arrays = Mapping[str, NDArray[Any]]
Boxes = Sequence[tuple[tuple[int, ...], NDArray[Any]]]
"""Of one tensor: where each begins, and its elements."""


@dataclass(frozen=True)
class Saved:
    """A mesh and the state that it has saved."""

    mesh: str
    """In words: shard 2 x tensor 2."""
    workers: int
    recipe: Recipe
    """With what the plan has filled in."""
    state: Path


@dataclass(frozen=True)
class Loaded:
    """What the workers of a mesh held when they had loaded a state."""

    parts: Mapping[str, Boxes]
    """What they would save of each tensor."""
    wrong: Sequence[str]
    """Tensors that a worker found wrong in its own hands: others may save its copies in its place."""


def main() -> int:
    """Save on every mesh, load on every mesh, write the page."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = root / "json-package"
        build_dataset(data, [f"{Path(json.__file__).parent}/*.py"], BuildOptions(vocab_size=300))
        saved = train(data, root)
        assert len({digest_in(one.state) for one in saved}) == len(saved), "one state could be taken for another"
        differences = {one.mesh: loads(one, [other.state for other in saved], root / "loaded") for one in saved}
        tensors = len(read_checkpoint(saved[0].state))
    for target, found in differences.items():
        for source, what in zip(saved, found, strict=True):
            if what:
                print(f"{source.mesh} -> {target}:", *what[:20], sep="\n  ")
    write(PAGE, "\n".join(table(list(differences), list(differences.values()), tensors)))
    return 1 if any(what for found in differences.values() for what in found) else 0


def tell(text: str) -> None:
    """Say what is going on."""
    print(text, file=sys.stderr, flush=True)


# -- saving


def recipe_on(mesh: str, data: Path, number: int) -> Recipe:
    """The recipe of one mesh; each has weights and steps of its own, so that no state can be taken for another."""
    values = {
        "seed": number,
        "model": MODEL,
        "data": {"path": str(data), "seq": 16},
        "train": TRAIN | {"steps": 3 + number % 3},
        "checkpoint": {"every_steps": 0},
        "parallel": parse_layout(mesh).model_dump(),
    }
    return parse_recipe(values, {}, "docs/reshards.py")


def words(mesh: str) -> str:
    """A mesh as the page calls it."""
    return describe(parse_layout(mesh), 1)


def train(data: Path, root: Path) -> list[Saved]:
    """Train and save on every mesh."""
    attempts = [new_run(recipe_on(mesh, data, i), root / "runs", name=f"mesh-{i}") for i, mesh in enumerate(MESHES)]
    attempts = [attempt.model_copy(update={"threads": 1}) for attempt in attempts]
    zygote = ZygoteClient.start(root / "zygote.log", worker_environment(attempts[0]))
    found = []
    try:
        for mesh, attempt in zip(MESHES, attempts, strict=True):
            tell(f"{words(mesh)}: trains and saves")
            outcome = supervise_run(attempt, warm=zygote)
            if outcome.state != "finished":
                raise SystemExit(f"{words(mesh)}: {outcome.reason}")
            state = find_checkpoint(attempt.folder.checkpoints)
            found.append(Saved(words(mesh), attempt.workers, read_recipe(attempt.folder), state))
    finally:
        zygote.close()
    return found


# -- loading


def loads(mesh: Saved, states: Sequence[Path], place: Path) -> list[list[str]]:
    """Have the workers of one mesh load every state; what is then different, by state."""
    tell(f"{mesh.mesh}: loads {len(states)} states")
    place.mkdir()
    arguments = (mesh.workers, mesh.recipe, states, place)
    torch.multiprocessing.start_processes(work, arguments, mesh.workers, start_method="forkserver")
    found = [compare(state, read_loaded(place, number)) for number, state in enumerate(states)]
    shutil.rmtree(place)
    return found


def work(rank: int, workers: int, recipe: Recipe, states: Sequence[Path], place: Path) -> None:
    """One worker of a mesh, from meeting the others to the last state."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # It warns that full_tensor is slow on nested shards, which is fine here.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    store = dist.FileStore(str(place / "rendezvous"), workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    load_all(rank, workers, recipe, states, place)
    dist.barrier()
    dist.destroy_process_group()


def load_all(rank: int, workers: int, recipe: Recipe, states: Sequence[Path], place: Path) -> None:
    """Build this worker's part of a mesh as a trainer does; load each state into it, and write down what it is then."""
    device = torch.device("cpu")
    sizes = (recipe.parallel or Parallel()).sizes(workers)
    world = make_mesh(rank, workers, device, sizes) if workers > 1 else World(rank=0, size=1, device=device)
    spread = parallelize_model(empty_model(recipe.model), recipe, world)
    held = ModelShare(world.rank, world.stage, spread.borrowed, spread.names)
    optimizer = build_optimizer(spread.model, recipe.train)
    live = named_state(spread.model, optimizer, held)
    places = {name: places_of(tensor, rank) for name, tensor in live.items()}
    for number, state in enumerate(states):
        forget(live)
        load_state(state, spread.model, optimizer, held)
        saved = read_checkpoint(state)
        mine = {name: saved[name].reshape(-1)[places[name]] for name in live}
        wrong = unlike(mine, {name: local(tensor).numpy().reshape(-1) for name, tensor in live.items()})
        own = pieces(live, held)
        note = {"starts": {piece.name: piece.start for piece in own}, "wrong": [f"{name} on {rank}" for name in wrong]}
        arrays = {piece.name: piece.data.reshape(piece.local_shape).view(piece.dtype) for piece in own}
        save_file(arrays, place / f"{number}-{rank}.safetensors", {"note": json.dumps(note)})


@torch.no_grad()
def places_of(tensor: torch.Tensor, rank: int) -> NDArray[np.int64]:
    """Where each of this worker's elements lies in the whole tensor, by what PyTorch makes of elements with numbers."""
    if not isinstance(tensor, DTensor):
        return np.arange(tensor.numel())
    mine = local(tensor)
    assert mine.numel() <= NUMBERS, "too large a tensor to number its elements"
    mine.copy_((rank * NUMBERS + torch.arange(mine.numel())).reshape(mine.shape))
    numbers = tensor.full_tensor().numpy().reshape(-1).astype(np.int64)
    places = np.flatnonzero(numbers // NUMBERS == rank)
    return places[np.argsort(numbers[places])]


@torch.no_grad()
def forget(state: Mapping[str, torch.Tensor]) -> None:
    """Leave nothing of what was loaded before, so that only what the next load writes can be right."""
    for tensor in state.values():
        local(tensor).fill_(float("nan"))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this worker has of a tensor, as memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- comparing


@cache
def read_checkpoint(folder: Path) -> Arrays:
    """Every tensor of a checkpoint, put together of its pieces by what the manifest says of them."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    files = {name: load_file(folder / name) for name in manifest["files"]}
    tensors = {}
    for name, entry in manifest["tensors"].items():
        boxes = [(tuple(piece["start"]), files[piece["file"]][name]) for piece in entry["pieces"]]
        tensors[name] = assemble(entry["shape"], boxes)
    return tensors


def read_loaded(place: Path, number: int) -> Loaded:
    """What all workers of a mesh have written down of one state."""
    parts: dict[str, list[tuple[tuple[int, ...], NDArray[Any]]]] = {}
    wrong = list[str]()
    for path in sorted(place.glob(f"{number}-*.safetensors")):
        with safe_open(path, "numpy") as file:
            note = json.loads(file.metadata()["note"])
            for name, start in note["starts"].items():
                parts.setdefault(name, []).append((tuple(start), file.get_tensor(name)))
            wrong += note["wrong"]
    return Loaded(parts, wrong)


def assemble(shape: Sequence[int], boxes: Boxes) -> NDArray[Any]:
    """A tensor from its boxes, which must have each of its elements exactly once."""
    whole = np.zeros(shape, boxes[0][1].dtype if boxes else np.float32)
    times = np.zeros(shape, np.uint8)
    for start, box in boxes:
        place = tuple(slice(first, first + size) for first, size in zip(start, box.shape, strict=True))
        whole[place] = box
        times[place] += 1
    if (times != 1).any():
        raise ValueError(f"{np.count_nonzero(times != 1)} of {times.size} elements are not there exactly once")
    return whole


def compare(state: Path, loaded: Loaded) -> list[str]:
    """What of a state differs from what a mesh made of it; nothing if no bit does."""
    saved = read_checkpoint(state)
    found = [f"{name}: not in the checkpoint" for name in loaded.parts if name not in saved]
    for name, tensor in saved.items():
        try:
            held = assemble(tensor.shape, loaded.parts.get(name, []))
        except ValueError as error:
            found.append(f"{name}: {error}")
        else:
            found += [f"{name}: other bits" for _ in unlike({name: tensor}, {name: held})]
    found += [f"{name}: other bits" for name in loaded.wrong]
    if not found and digest_of(saved, loaded) != digest_in(state):
        found.append("the digest")
    return found


def unlike(saved: Arrays, found: Arrays) -> list[str]:
    """The tensors whose type, shape or bytes are not as they were saved."""
    pairs = ((name, saved[name], tensor) for name, tensor in found.items())
    return [name for name, a, b in pairs if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes())]


def digest_in(state: Path) -> str:
    """The digest that a checkpoint says it has."""
    return str(json.loads((state / "manifest.json").read_bytes())["digest"])


def digest_of(saved: Arrays, loaded: Loaded) -> str:
    """The digest of what a mesh holds, from the boxes that it lies in there."""
    entries = []
    for name, parts in loaded.parts.items():
        shape, dtype = saved[name].shape, str(saved[name].dtype)
        boxes = [(Box(start, part.shape), part.view(f"<u{part.itemsize}")) for start, part in parts]
        entries.append((name, dtype, shape, sum(digest_box(bits, shape, box) for box, bits in boxes) % 2**64))
    return state_digest(entries)


# -- the page


def table(meshes: Sequence[str], differences: Sequence[Sequence[Sequence[str]]], tensors: int) -> Iterator[str]:
    """A row for each mesh that saved; a column for each that loads, which has the number of its row."""
    yield f"{tensors} tensors in each state:"
    yield ""
    yield f"| | saved by | {' | '.join(str(i) for i in range(1, len(meshes) + 1))} |"
    yield f"|---:|---|{':-:|' * len(meshes)}"
    for row, mesh in enumerate(meshes):
        names = [{what.split()[0] for what in found[row]} for found in differences]  # on however many workers
        cells = [f"{len(wrong)} differ" if wrong else "=" for wrong in names]
        yield f"| {row + 1} | {mesh} | {' | '.join(cells)} |"
    yield ""


def write(page: Path, text: str) -> None:
    """Put a table where the page has its marks."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    sys.exit(main())
