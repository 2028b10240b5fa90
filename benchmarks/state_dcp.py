"""Ranks that stand beside Headway's in state.py: training with PyTorch's DCP, bare copies and reads, loads by both.

    python benchmarks/state_dcp.py JOB.json RANK        started by state.py, which says in JOB what to do

The model, its layout and its step are Headway's own; only who saves differs. DCP gets every help that is known: a
process group of its own, a state dict that is made once, and all of its threads and processes on the core that does not
train. Three ways of `async_save` are tried:

    thread   as documented: a thread writes what was staged into new memory
    kept     the same with a stager that is kept, so that its memory is warm
    process  a process writes what was staged into shared memory that is kept
"""

import ctypes
import json
import math
import mmap
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from headway.errors import StateError
from headway.models import empty_decoder
from headway.parallel import ParallelModel, World, finish_gradients, make_mesh, parallelize_model, total_norm
from headway.parallel.local_part import to_local
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe import Parallel, Recipe
from headway.state import CheckpointSource, FolderCheckpoint, open_checkpoint
from headway.state.tensors import ModelShare, load_state, named_state
from headway.train.build import build_optimizer
from state import Trained, drop_from_cache, make_recipe

FREE_STEPS = 2
"""Steps after each save that no write disturbs."""
READ_BYTES = 8 << 20
Job = dict[str, Any]


# -- the model and its step


def meet(job: Job, rank: int, recipe: Recipe) -> World:
    """This rank's place on the mesh; the threads of the group's transport stay on the core that trains."""
    workers, device = job["workers"], torch.device("cpu")
    if workers == 1:
        return World(rank=0, size=1, device=device)
    store = dist.FileStore(job["rendezvous"], workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    return make_mesh(rank, workers, device, (recipe.parallel or Parallel()).sizes(workers))


def make_model(recipe: Recipe, world: World) -> tuple[ParallelModel, torch.optim.Optimizer, ModelShare]:
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world)
    with torch.no_grad():
        for parameter in spread.model.parameters():  # any numbers will do, and these are drawn for this rank alone
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).normal_(0, 0.02)
    held = ModelShare(world.rank, world.stage, spread.borrowed, spread.names)
    return spread, build_optimizer(spread.model, recipe.train), held


def make_step(
    recipe: Recipe, world: World, spread: ParallelModel, optimizer: torch.optim.Optimizer
) -> Callable[[bool], bool]:
    """A step as train/loop.py makes it; it also finds out whether all ranks say yes."""
    rows, seq = recipe.train.batch // world.data.size, recipe.data.seq
    tokens = torch.randint(0, 256, (rows, seq + 1), generator=torch.Generator().manual_seed(world.rank))
    parameters = dict(spread.model.named_parameters())

    def step(says_yes: bool) -> bool:
        loss = spread.passes(
            DeviceBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
            SumScale.per_label(recipe.train.batch * seq),
        )
        finish_gradients(parameters, spread.missing)
        norm = total_norm(parameters, world, spread.borrowed)
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        totals = world.sum(torch.tensor([float(loss), float(says_yes)], dtype=torch.float64))
        return totals[1].item() == world.size

    return step


# -- cores


@contextmanager
def on(core: int | None) -> Iterator[None]:
    """Do something on a core: threads and processes that begin meanwhile stay there."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def move_others(core: int | None, but: set[int]) -> None:
    """Have every other thread of this process, and every process it has started, run on a core."""
    if core is None:
        return
    started = psutil.Process().children(recursive=True)
    for number in (threads() - but) | {thread.id for child in started for thread in child.threads()}:
        try:
            os.sched_setaffinity(number, {core})
        except ProcessLookupError:
            continue  # it has ended meanwhile


# -- training, with saves by DCP


class Saver:
    """Saves by one of DCP's ways, and tells when each began, let go and was durable."""

    def __init__(self, way: str, folder: Path, state: dict[str, torch.Tensor], core: int | None) -> None:
        self._folder, self._state, self._core = folder, state, core
        self._staying = threads()
        with on(core):
            self._group = dist.new_group(backend="gloo")
        shared = way == "process"
        self._stager = None if way == "thread" else DefaultStager(StagingOptions(False, shared, False, False))
        self._type = AsyncCheckpointerType.PROCESS if shared else AsyncCheckpointerType.THREAD
        self._future: Future[Any] | None = None
        self.saves: list[dict[str, float]] = []

    @property
    def done(self) -> bool:
        return self._future is None or self._future.done()

    def save(self, number: int) -> None:
        begun = time.monotonic()
        if self._future is not None:
            self._future.result()
        future = dcp.async_save(
            self._state,
            checkpoint_id=str(self._folder / f"{number:04d}"),
            process_group=self._group,
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )
        let_go = time.monotonic()
        assert isinstance(future, Future), "staging is not asynchronous here"
        said = {"begin": begun, "stall": let_go - begun, "writes": let_go}
        future.add_done_callback(lambda _: said.update(done=time.monotonic()))
        move_others(self._core, self._staying)
        self._future = future
        self.saves.append(said)

    def settle(self) -> None:
        """A save is done: see that it went well."""
        assert self._future is not None
        self._future.result()
        move_others(self._core, self._staying)  # a helper process that the first save has started

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


def train(job: Job, rank: int) -> dict[str, Any]:
    """Steps with a save now and then, by each way; before them, copies of the same tensors into warm memory."""
    recipe = make_recipe(job["mb"], {"shard": job["workers"]})
    world = meet(job, rank, recipe)
    spread, optimizer, held = make_model(recipe, world)
    step = make_step(recipe, world, spread, optimizer)
    state = named_state(spread.model, optimizer, held)
    for _ in range(2):
        step(False)
    found: dict[str, Any] = {"copies": copies(state, job["copies"], lambda: step(False))}
    for way in job["ways"]:
        saver = Saver(way, Path(job["folder"]) / way, state, job["saves_on"])
        steps: list[tuple[float, float]] = []
        for number in range(1, job["saves"] + 1):
            saver.save(number)
            free = FREE_STEPS
            while free:
                done, begun = saver.done, time.monotonic()
                free -= step(done)
                steps.append((begun, time.monotonic()))
            saver.settle()
        saver.close()
        found[way] = Trained(steps, saver.saves).as_dict()
    return found


def copies(state: dict[str, torch.Tensor], count: int, between: Callable[[], Any]) -> dict[str, list[float]]:
    """Seconds to copy this rank's tensors into warm memory of its own, and into warm memory that can be shared."""
    if not count:
        return {}
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in state.values()]
    targets = {
        "private": [torch.ones_like(part) for part in parts],
        "shared": [torch.ones_like(part).share_memory_() for part in parts],
    }
    found: dict[str, list[float]] = {kind: [] for kind in targets}
    for _ in range(count + 1):
        between()
        for kind, memory in targets.items():
            together()
            begun = time.monotonic()
            for target, part in zip(memory, parts, strict=True):
                target.copy_(part)
            found[kind].append(time.monotonic() - begun)
    return {kind: seconds[1:] for kind, seconds in found.items()}


# -- loading


def load(job: Job, rank: int) -> dict[str, Any]:
    """The same state into another mesh by Headway, by DCP, and the bare bytes; from a cold and from a warm cache."""
    recipe = make_recipe(job["mb"], job["mesh"])
    world = meet(job, rank, recipe)
    spread, optimizer, held = make_model(recipe, world)
    ours, peers = Path(job["ours"]), Path(job["dcp"])
    state = named_state(spread.model, optimizer, held)
    noting = Noting(ours)
    load_state(open_checkpoint(noting), spread.model, optimizer, held)
    memory = mmap.mmap(-1, sum(size for _, _, size in noting.reads), flags=mmap.MAP_PRIVATE)
    memory[:] = b"\1" * len(memory)
    ways: dict[str, tuple[Path, Callable[[], Any]]] = {
        "raw": (ours, lambda: read_raw(ours, noting.reads, memory)),
        "headway": (ours, lambda: load_state(ours, spread.model, optimizer, held)),
        "dcp": (peers, lambda: dcp.load(state, checkpoint_id=str(peers))),
    }
    found: dict[str, Any] = {"in_cache_when_cold": 0.0, "read_bytes": len(memory), "held_bytes": held_bytes(state)}
    for name, (folder, way) in ways.items():
        found[name] = {"first": timed(way), "cold": [], "warm": []}  # the moments are new memory for Headway's first
        for _ in range(job["repeats"]):
            together()
            if rank == 0:
                drop_from_cache(folder)
                found["in_cache_when_cold"] = max(found["in_cache_when_cold"], share_in_cache(folder))
            found[name]["cold"].append(timed(way))
            found[name]["warm"].append(timed(way))
    if job["flip"]:
        found["flipped"] = flipped(job, spread, optimizer, held)
    return found


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def timed(way: Callable[[], Any]) -> float:
    together()
    begun = time.monotonic()
    way()
    return time.monotonic() - begun


class Noting(CheckpointSource):
    """A checkpoint's folder that notes what is read of it."""

    def __init__(self, path: Path) -> None:
        self._folder, self.place = FolderCheckpoint(path), str(path)
        self.reads: list[tuple[str, int, int]] = []

    def manifest(self) -> bytes:
        return self._folder.manifest()

    def size(self, file: str) -> int:
        return self._folder.size(file)

    def read(self, file: str, begin: int, out: memoryview) -> None:
        self.reads.append((file, begin, len(out)))
        self._folder.read(file, begin, out)


def held_bytes(state: dict[str, torch.Tensor]) -> int:
    """What a rank holds of a state."""
    return sum(to_local(tensor).nbytes for tensor in state.values())


def read_raw(folder: Path, reads: list[tuple[str, int, int]], memory: mmap.mmap) -> None:
    """Read the same bytes in the same order into memory, as fast as one thread can."""
    place, files = 0, {name: os.open(folder / name, os.O_RDONLY) for name in {name for name, _, _ in reads}}
    for descriptor in files.values():
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    for name, begin, size in reads:
        done = 0
        while done < size:
            done += os.preadv(files[name], [memoryview(memory)[place + done : place + size]], begin + done)
        place += size
    for descriptor in files.values():
        os.close(descriptor)


def share_in_cache(folder: Path) -> float:
    """Which share of a folder's pages is in the page cache."""
    there = pages = 0
    for path in folder.iterdir():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as memory:
            view = np.frombuffer(memory, np.uint8)
            marks = np.zeros(-(-view.size // mmap.PAGESIZE), np.uint8)
            address, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.size)
            if ctypes.CDLL(None).mincore(address, size, ctypes.c_void_p(marks.ctypes.data)):
                return math.nan
            there, pages = there + int((marks & 1).sum()), pages + marks.size
            del view
    return there / max(1, pages)


# -- damage


def flipped(job: Job, spread: ParallelModel, optimizer: torch.optim.Optimizer, held: ModelShare) -> dict[str, str]:
    """What each says of a copy of its checkpoint with one byte changed in the middle of a tensor."""
    state = named_state(spread.model, optimizer, held)
    name = next(name for name, tensor in state.items() if name.startswith("model/layers") and tensor.ndim == 2)
    ours, peers = Path(job["ours"]), Path(job["dcp"])
    piece = open_checkpoint(ours).manifest.tensors[name].pieces[0]
    damaged = link_copy(ours, Path(job["folder"]) / "flipped", piece.file)
    flip(damaged / piece.file, piece.offset + piece.box.volume * 2)
    try:
        load_state(damaged, spread.model, optimizer, held)
        said = "loaded"
    except StateError as error:
        said = f"refused: {error.message.replace(str(damaged) + '/', '')}"

    places = dcp.FileSystemReader(str(peers)).read_metadata().storage_data
    place = next(info for index, info in places.items() if index.fqn == name)
    damaged = link_copy(peers, Path(job["folder"]) / "flipped-dcp", place.relative_path)
    flip(damaged / place.relative_path, place.offset + place.length // 2)
    dcp.load(state, checkpoint_id=str(peers))
    right = state[name].clone()
    try:
        dcp.load(state, checkpoint_id=str(damaged))
        wrong = int((state[name] != right).sum())
        other = f"loaded without a word; {wrong} value of {name} is wrong" if wrong else "loaded"
    except Exception as error:
        other = f"refused: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return {"tensor": name, "headway": said, "dcp": other}


def link_copy(folder: Path, copy: Path, own: str) -> Path:
    """A copy of a folder that shares all files with it but one."""
    copy.mkdir()
    for path in folder.iterdir():
        (shutil.copyfile if path.name == own else os.link)(path, copy / path.name)
    return copy


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if job["steps_on"] is not None:
        os.sched_setaffinity(0, {job["steps_on"]})
    result = {"train": train, "load": load}[job["kind"]](job, rank)
    Path(f"{job['results']}-{rank}.json").write_text(json.dumps(result))
    together()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
