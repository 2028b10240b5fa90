"""Loads what each of many meshes has saved into each of them, and writes the table of docs/concepts/state.md.

python docs/reshards.py      some minutes on two cores; exits 1 when any pair is not equal bit for bit

Every mesh trains a small model for a few steps, and its agent saves the state. Then the workers of every mesh load each
of these states and tell what they hold, which is compared with the files that were saved. Those are read here with
`json`, NumPy and the safetensors library alone, so that no mistake in how Headway reads can hide itself; and whether a
worker holds what it should, PyTorch says (`full_tensor`), and not Headway's idea of a layout.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

from headway.agent import new_run, supervise
from headway.agent.check import describe
from headway.agent.supervise import worker_environment
from headway.agent.zygote import Zygote
from headway.cli.mesh import parse_layout
from headway.data import BuildOptions, build
from headway.parallel import World, apply, make_mesh
from headway.recipe import Parallel, Recipe
from headway.recipe.load import parse_recipe
from headway.state import Box, digest_box, find_checkpoint, state_digest
from headway.state.tensors import Held, load_state, named_state, pieces
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
PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "headway.agent.check", "headway.data", "headway.train.build"]
"""What every worker imports: done once, in the process that they are forked from."""
NUMBERS = 1 << 20
"""For the elements of one rank, to see where they lie; float32 tells those of 16 ranks apart."""

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Loaded:
    """What the workers of a mesh held after they had loaded a state."""

    parts: Mapping[str, Sequence[tuple[tuple[int, ...], NDArray[Any]]]]
    """The boxes of each tensor that they would save: where each begins, and its elements."""
    wrong: Sequence[str]
    """What a worker found to differ in its own copies, which others may have saved in its place."""


def main() -> int:
    """Save on every mesh, load on every mesh, write the page."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = root / "json-package"
        build(data, [f"{Path(json.__file__).parent}/*.py"], BuildOptions(vocab_size=300))
        recipes, states = train(data, root)
        names = [describe(parse_layout(mesh), workers_of(mesh)) for mesh in MESHES]
        cells = []
        for mesh, recipe in enumerate(recipes):
            told(f"{names[mesh]}: loads {len(states)} states")
            place = root / f"loaded-{mesh}"
            start(workers_of(MESHES[mesh]), recipe, states, place)
            cells.append([compare(state, read_loaded(place, number)) for number, state in enumerate(states)])
            shutil.rmtree(place)
        tensors = len(read_checkpoint(states[0]))
    for target, found in zip(names, cells, strict=True):
        for source, differences in zip(names, found, strict=True):
            if differences:
                print(f"{source} -> {target}:", *differences[:20], sep="\n  ")
    write(PAGE, "\n".join(table(names, cells, tensors)))
    return 1 if any(differences for found in cells for differences in found) else 0


def told(text: str) -> None:
    """Say what is going on."""
    print(text, file=sys.stderr, flush=True)


# -- saving


def recipe_on(mesh: str, data: Path, number: int) -> Recipe:
    """The recipe of one mesh; each has weights and samples of its own, so that no state can be taken for another."""
    train = {"steps": 3 + number % 3, "batch": 12, "microbatch": 2, "lr": 1e-2, "warmup_steps": 1, "device": "cpu"}
    values = {"seed": number, "model": MODEL, "data": {"path": str(data), "seq": 16}, "train": train,
              "checkpoint": {"every_steps": 0}, "parallel": parse_layout(mesh).model_dump()}  # fmt: skip
    return parse_recipe(values, {}, "docs/reshards.py")


def workers_of(mesh: str) -> int:
    """How many workers a mesh takes."""
    parallel: Parallel = parse_layout(mesh)
    return int(np.prod(list(parallel.sizes(1).values())))


def train(data: Path, root: Path) -> tuple[list[Recipe], list[Path]]:
    """Train and save on every mesh; the recipes, with what the plan has filled in, and the checkpoints."""
    attempts = [new_run(recipe_on(mesh, data, i), root / "runs", name=f"mesh-{i}") for i, mesh in enumerate(MESHES)]
    zygote = Zygote(root / "zygote.log", worker_environment(attempts[0].model_copy(update={"threads": 1})))
    try:
        for mesh, attempt in zip(MESHES, attempts, strict=True):
            told(f"{mesh}: trains and saves")
            outcome = supervise(attempt.model_copy(update={"threads": 1}), warm=zygote)
            if outcome.state != "finished":
                raise SystemExit(f"{mesh}: {outcome.reason}")
    finally:
        zygote.close()
    folders = [attempt.folder for attempt in attempts]
    return [read_recipe(folder) for folder in folders], [find_checkpoint(folder.checkpoints) for folder in folders]


# -- loading, in workers


def start(workers: int, recipe: Recipe, states: Sequence[Path], place: Path) -> None:
    """Have the workers of one mesh load every state, and wait for them."""
    place.mkdir()
    arguments = (workers, recipe, states, place)
    torch.multiprocessing.start_processes(work, arguments, workers, start_method="forkserver")


def work(rank: int, workers: int, recipe: Recipe, states: Sequence[Path], place: Path) -> None:
    """One worker of a mesh, from meeting the others to the last state."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
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
    spread = apply(empty_model(recipe.model), recipe, world)
    held = Held(world.rank, world.stage, spread.borrowed, spread.names)
    optimizer = build_optimizer(spread.model, recipe.train)
    live = named_state(spread.model, optimizer, held)
    places = {name: places_of(tensor, rank) for name, tensor in live.items()}
    for number, state in enumerate(states):
        forget(live)
        load_state(state, spread.model, optimizer, held)
        saved = read_checkpoint(state)
        wrong = unlike({name: saved[name].reshape(-1)[places[name]] for name in live}, flat(live))
        mine = pieces(live, held)
        boxes = {piece.name: piece.start for piece in mine}
        note = {"boxes": json.dumps(boxes), "wrong": json.dumps([f"{name} (worker {rank})" for name in wrong])}
        arrays = {piece.name: piece.data.reshape(piece.local_shape).view(piece.dtype) for piece in mine}
        save_file(arrays, place / f"{number}-{rank}.safetensors", metadata=note)


@torch.no_grad()
def places_of(tensor: torch.Tensor, rank: int) -> NDArray[np.int64]:
    """Where each of this worker's elements lies in the whole tensor, by what PyTorch makes of elements with numbers."""
    if not isinstance(tensor, DTensor):
        return np.arange(tensor.numel())
    local = tensor.to_local()
    assert local.numel() <= NUMBERS, "too large a tensor to number its elements"
    local.copy_((rank * NUMBERS + torch.arange(local.numel())).reshape(local.shape))
    numbers = tensor.full_tensor().numpy().reshape(-1).astype(np.int64)
    mine = np.flatnonzero(numbers // NUMBERS == rank)
    return mine[np.argsort(numbers[mine])]


@torch.no_grad()
def forget(state: Mapping[str, torch.Tensor]) -> None:
    """Leave nothing of what was loaded before, so that only what the next load writes can be right."""
    for tensor in state.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(float("nan"))


def flat(state: Mapping[str, torch.Tensor]) -> Arrays:
    """This worker's elements of every tensor, in a row."""
    local = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
    return {name: tensor.numpy().reshape(-1) for name, tensor in local.items()}


# -- comparing


def read_checkpoint(folder: Path) -> dict[str, NDArray[Any]]:
    """Every tensor of a checkpoint, put together of its pieces by what the manifest says of them."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    files = {name: load_file(folder / name) for name in manifest["files"]}
    return {
        name: assemble(
            entry["shape"],
            [(tuple(piece["start"]), files[piece["file"]][name]) for piece in entry["pieces"]],
        )
        for name, entry in manifest["tensors"].items()
    }


def read_loaded(place: Path, number: int) -> Loaded:
    """What all workers of a mesh have written down of one state."""
    parts: dict[str, list[tuple[tuple[int, ...], NDArray[Any]]]] = {}
    wrong: list[str] = []
    for path in sorted(place.glob(f"{number}-*.safetensors")):
        with safe_open(path, "numpy") as file:
            note = file.metadata()
            wrong += json.loads(note["wrong"])
            for name, start in json.loads(note["boxes"]).items():
                parts.setdefault(name, []).append((tuple(start), file.get_tensor(name)))
    return Loaded(parts, wrong)


def assemble(shape: Sequence[int], parts: Sequence[tuple[tuple[int, ...], NDArray[Any]]]) -> NDArray[Any]:
    """A tensor from its boxes, each element of which must be there exactly once."""
    whole, times = np.zeros(shape, parts[0][1].dtype), np.zeros(shape, np.uint8)
    for begin, part in parts:
        place = tuple(slice(first, first + size) for first, size in zip(begin, part.shape, strict=True))
        whole[place] = part
        times[place] += 1
    if (times != 1).any():
        raise ValueError(f"{np.count_nonzero(times != 1)} of {times.size} elements are not there exactly once")
    return whole


def compare(state: Path, loaded: Loaded) -> list[str]:
    """What of a state differs from what a mesh made of it; nothing if no bit does."""
    saved = read_checkpoint(state)
    found = [f"{name}: not whole" for name in saved if not whole(saved[name].shape, loaded.parts.get(name))]
    if not found:
        tensors = {name: assemble(saved[name].shape, loaded.parts[name]) for name in saved}
        found = [f"{name}: other bits" for name in unlike(saved, tensors)]
    found += [f"{name}: not in the checkpoint" for name in loaded.parts if name not in saved]
    found += [f"{name}: other bits" for name in loaded.wrong]
    if not found and digest_of(saved, loaded) != json.loads((state / "manifest.json").read_bytes())["digest"]:
        found = ["the digest"]
    return found


def whole(shape: Sequence[int], parts: Sequence[tuple[tuple[int, ...], NDArray[Any]]] | None) -> bool:
    """Whether boxes have every element of a tensor once."""
    try:
        return parts is not None and assemble(shape, parts).shape == tuple(shape)
    except ValueError:
        return False


def unlike(saved: Arrays, found: Arrays) -> list[str]:
    """The tensors whose bytes, shape or type are not as they were saved."""
    return [
        name
        for name, tensor in found.items()
        if name not in saved
        or (tensor.dtype, tensor.shape, tensor.tobytes())
        != (saved[name].dtype, saved[name].shape, saved[name].tobytes())
    ]


def digest_of(saved: Arrays, loaded: Loaded) -> str:
    """The digest of what a mesh holds, from the boxes that it lies in there."""
    entries = []
    for name, parts in loaded.parts.items():
        shape, dtype = saved[name].shape, str(saved[name].dtype)
        boxes = [(Box(begin, part.shape), part.view(f"<u{part.itemsize}")) for begin, part in parts]
        entries.append((name, dtype, shape, sum(digest_box(bits, shape, box) for box, bits in boxes) % 2**64))
    return state_digest(entries)


# -- the page


def table(names: Sequence[str], cells: Sequence[Sequence[Sequence[str]]], tensors: int) -> Iterator[str]:
    """A row for each mesh that saved, a column for each that loads, which has that row's number."""
    yield f"| | saved by | {' | '.join(str(i) for i in range(1, len(names) + 1))} |"
    yield f"|---:|---|{':-:|' * len(names)}"
    for number, name in enumerate(names):
        found = [cell(loads[number], tensors) for loads in cells]
        yield f"| {number + 1} | {name} | {' | '.join(found)} |"
    yield ""


def cell(differences: Sequence[str], tensors: int) -> str:
    """What one pair came to."""
    return f"{len(differences)} of {tensors} differ" if differences else "="


def write(page: Path, text: str) -> None:
    """Put a table where the page has its marks."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    sys.exit(main())
