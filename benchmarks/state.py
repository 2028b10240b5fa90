"""What saving and loading a training state costs: Headway beside PyTorch's DCP, in the same run.

    python benchmarks/state.py [--mb 1024] [--repeats 5] [--out FILE] [--folder FOLDER]

Two CPU workers share a decoder's state (FSDP2; weights and AdamW's moments in float32) and train it: Headway's through
its agent, the peer's in state_dcp.py with the same model and step. Workers are pinned to one core, whatever writes to
another; then Headway and DCP's best are run with nothing pinned.

    stall      what a save takes from the steps, beside a copy of the same tensors into warm memory
    durable    from a save's beginning to its commit, while training goes on, beside bare writes with fsync: plain ones,
               and past the page cache
    steps      how much longer those steps take that a save's writing touches; a write may be shorter than a step, and
               "the pace under it" is what that comes to if the write alone is to blame
    load       the state of two shards into two halves of each matrix (tensor = 2) and into one worker, from a cold and
               from a warm page cache, beside a bare read of the very same bytes into memory that is there
    flipped    one byte of a tensor changed in a copy of the checkpoint

The first save of each run is left out: it finds memory cold. Medians over the others. Linux only.
"""

import argparse
import contextlib
import json
import math
import mmap
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headway.agent import new_run, supervise_run
from headway.agent.workers.zygote import ZygoteClient
from headway.data import BuildOptions, build_dataset
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from headway.state import Box, digest_box, verify_checkpoint
from headway.state.manifest import chunk_checksums
from headway.track import Record, RunFolder, read_run

LAYERS, HEAD, BYTES_A_PARAMETER = 7, 64, 12
SEQ, BATCH, VOCABULARY = 8, 2, 300
WRITE_BYTES = 8 << 20
WAYS = ("thread", "kept", "process")
LIMIT_S = 400
"""For each part; a full run takes as long for all of them."""
GOALS = {"stall": 1.2, "durable": 1.5, "steps": 1.15, "load": 1.5}
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
Span = tuple[float, float]
Cores = tuple[int | None, int | None]
"""Where steps are made, and where states are written; None is anywhere."""


def make_recipe(mb: int, mesh: dict[str, int], data: Path | None = None, **train: Any) -> Recipe:
    """A decoder whose weights and moments are about so many MiB, on a mesh."""
    dim = max(2, round(math.sqrt(mb * 2**20 / BYTES_A_PARAMETER / LAYERS / 12) / HEAD / 2) * 2) * HEAD
    # None is removed meanwhile, as none of DCP's is: that would come on top of what is measured.
    checkpoint = {"every_steps": train.pop("save_every", 0), "keep_last": 1000}
    values = {
        "name": "state",
        "model": {"layers": LAYERS, "dim": dim, "heads": dim // HEAD, "vocab_size": 320},
        "data": {"path": str(data or "-"), "seq": SEQ},
        "train": {"batch": BATCH, "device": "cpu", "recompute": "none", "restarts": 0, "warmup_steps": 0} | train,
        "parallel": {"shard": 1, "keep_weights": True} | mesh,
        "checkpoint": checkpoint,
    }
    return parse_recipe(values, {}, "benchmark")


# -- what was measured of a training with saves


@dataclass(frozen=True)
class Trained:
    """One worker's steps and saves, in seconds of the machine's monotonic clock."""

    steps: list[Span]
    saves: list[dict[str, float]]
    """Of each: when it `begin`s, its `stall`, when it `writes` from, when it is `done`."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def slowest(workers: Sequence[Trained]) -> Trained:
    """One story of all workers: a save lasts from the first worker's beginning to the last one's end."""
    ends = {"begin": min, "writes": min, "stall": max, "done": max}
    together = zip(*(worker.saves for worker in workers), strict=True)
    saves = [{key: pick(save[key] for save in each) for key, pick in ends.items()} for each in together]
    return Trained(workers[0].steps, saves)


def figures(trained: Trained) -> dict[str, Any]:
    """Medians, without the first save."""
    saves = trained.saves[1:]
    writes = [(save["writes"], save["done"]) for save in saves]
    steps = [step for step in trained.steps if step[0] >= saves[0]["begin"]]
    undisturbed = [end - begin for begin, end in steps if not any(overlap((begin, end), write) for write in writes)]
    base = median(undisturbed or [min(end - begin for begin, end in steps)])  # a disk so slow that it never rests
    slowed = [slowdown(steps, write, base) for write in writes]
    times = median([times for times, _, _ in slowed])
    return {
        "stall_s": median([save["stall"] for save in saves]),
        "durable_s": median([save["done"] - save["begin"] for save in saves]),
        "write_s": median([end - begin for begin, end in writes]),
        "step_s": base,
        "slowdown": median([touched for _, _, touched in slowed]),
        "pace": times,
        "lost_s_a_save": median([lost for _, lost, _ in slowed]),
        "each_stall_s": [save["stall"] for save in saves],
        "each_durable_s": [save["done"] - save["begin"] for save in saves],
        "each_slowdown": [touched for _, _, touched in slowed],
        "each_pace": [times for times, _, _ in slowed],
    }


def slowdown(steps: Sequence[Span], write: Span, base: float) -> tuple[float, float, float]:
    """How many times longer steps take under a write, the seconds they lose, how much longer those it touches take.

    A write may end before a step does. What the steps that it touches take longer than others is lost while it lasts:
    in `under` seconds only `under - lost` seconds' worth of steps is done. 100 stands for a stop.
    """
    touched = [step for step in steps if overlap(step, write)]
    under = sum(overlap(step, write) for step in touched)
    lost = sum(end - begin - base for begin, end in touched)
    return under / max(under - lost, under / 100), lost, 1 + lost / max(len(touched), 1) / base


def slowest_of(workers: Sequence[Sequence[float]]) -> float:
    """The median over turns, in each of which the slowest worker counts."""
    return median([max(turn) for turn in zip(*workers, strict=True)])


def overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


# -- ours


def train_here(job: dict[str, Any]) -> None:
    """The agent of a run: workers on one core, the agent on another, or all on all."""
    recipe = make_recipe(job["mb"], {"shard": 2}, Path(job["data"]), steps=job["steps"], save_every=job["every"])
    if job["steps_on"] is not None:
        os.sched_setaffinity(0, {job["steps_on"]})
    zygote = ZygoteClient.start(Path(job["folder"]) / "zygote.log", os.environ)
    if job["saves_on"] is not None:
        os.sched_setaffinity(0, {job["saves_on"]})
    with contextlib.closing(zygote):
        while not zygote.ready(timeout_s=1.0):
            pass
        attempt = new_run(recipe, Path(job["folder"]), name="run", workers=2)
        outcome = supervise_run(attempt.model_copy(update={"threads": 1}), warm=zygote)
    if outcome.state != "finished":
        sys.exit(f"{outcome.reason}\n{outcome.hint}")


def read_ours(run: RunFolder) -> dict[str, Any]:
    """What the records of a run tell."""
    records = {record.header.process: record for record in read_run(run)}
    agent = records["agent"]
    written = {e["step"]: e["seconds"] for e in agent.events if e["kind"] == "checkpoint"}
    kept = {e["step"]: seconds(agent, e) for e in agent.events if e["kind"] == "kept"}
    durable = [(at, at + written.get(step, math.nan)) for step, at in sorted(kept.items())]
    workers = []
    for rank in range(2):
        record = records[f"rank-{rank}"]
        steps = [(seconds(record, e) - (e["data"] + e["compute"]) / 1e9, seconds(record, e))
                 for e in record.events if e["kind"] == "step"]  # fmt: skip
        saves = [{"begin": begin, "stall": end - begin, "writes": writes, "done": done}
                 for (begin, end), (writes, done) in zip(spans(record, "checkpoint"), durable, strict=True)
                 if not math.isnan(done)]  # fmt: skip
        workers.append(Trained(steps, saves))
    story = slowest(workers)
    last = story.saves.pop()  # the workers have ended by then
    memory = next(e for e in agent.events if e["kind"] == "memory")
    return figures(story) | {
        "durable_at_rest_s": last["done"] - last["begin"],
        "skipped": sum(e["kind"] == "skipped" for e in agent.events),
        "memory_bytes": memory["bytes"],
        "buffers": memory["buffers"],
    }


def seconds(record: Record, event: dict[str, Any]) -> float:
    return (record.header.mono + event["t"]) / 1e9


def spans(record: Record, name: str) -> list[Span]:
    at = {kind: [seconds(record, e) for e in record.events if e["kind"] == kind and e["name"] == name]
          for kind in ("begin", "end-span")}  # fmt: skip
    return list(zip(at["begin"], at["end-span"], strict=True))


# -- the bare disk and its cache


def write_raw(path: Path, memory: mmap.mmap, flag: int) -> float:
    """Seconds to write memory to a new file and sync it."""
    begun = time.monotonic()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag, 0o600)
        try:
            for begin in range(0, len(memory), WRITE_BYTES):
                os.write(descriptor, memoryview(memory)[begin : begin + WRITE_BYTES])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return time.monotonic() - begun
    finally:
        path.unlink(missing_ok=True)


def drop_from_cache(folder: Path) -> None:
    """Have the next read of a folder's files come from the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def only_last(folder: Path) -> Path:
    """The last checkpoint of a folder; the others are removed."""
    *others, last = sorted(folder.iterdir())
    for other in others:
        shutil.rmtree(other)
    return last


def file_system(folder: Path) -> str:
    """The kind of file system that a folder lies on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    over = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(over, default=(0, "unknown"))[1]


# -- processes


class Failed(SystemExit):
    """A part did not come to its end."""


@contextlib.contextmanager
def started(commands: Sequence[Sequence[str]], logs: Sequence[Path]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes in sessions of their own, all of which are gone afterwards, whatever happens."""
    environment = os.environ | ENVIRONMENT
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("ab") as output:
                said: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                process = subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True, **said)
                processes.append(process)
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Run processes to their end; the first that fails, or the clock, ends all."""
    logs = [folder / f"{number}.log" for number in range(len(commands))]
    with started(commands, logs) as processes:
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in processes):
            failed = [number for number, process in enumerate(processes) if process.returncode]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        codes = [process.poll() for process in processes]
    for command, code, log in zip(commands, codes, logs, strict=True):
        if code != 0:
            how = f"took more than {LIMIT_S} s" if code is None else f"ended with status {code}"
            raise Failed(f"{' '.join(command)} {how}:\n{log.read_text(errors='replace')[-3000:]}")


# -- the parts of the benchmark


class Bench:
    """A folder, two cores, and the sizes of it all."""

    def __init__(self, folder: Path, mb: int, repeats: int) -> None:
        self.folder, self.mb, self.repeats = folder, mb, repeats
        cores = sorted(os.sched_getaffinity(0))
        # A disk's interrupts mostly land on the first core: whoever writes has them there.
        self.pinned = (cores[1], cores[0]) if len(cores) > 1 else (None, None)
        self._count = 0
        self.data = folder / "data"
        build_dataset(self.data, [f"{Path(json.__file__).parent}/*.py"], BuildOptions(vocab_size=VOCABULARY))

    def ranks(self, workers: int, pinned: Cores, **job: Any) -> list[dict[str, Any]]:
        """Have ranks of state_dcp.py do a job; what each found."""
        self._count += 1
        place = self.folder / f"job-{self._count}"
        place.mkdir()
        common = {"mb": self.mb, "workers": workers, "steps_on": pinned[0], "saves_on": pinned[1]}
        common |= {"folder": str(place), "results": str(place / "result"), "rendezvous": str(place / "store")}
        (place / "job.json").write_text(json.dumps(common | job))
        script = str(Path(__file__).with_name("state_dcp.py"))
        run([[script, str(place / "job.json"), str(rank)] for rank in range(workers)], place)
        return [json.loads(Path(place / f"result-{rank}.json").read_text()) for rank in range(workers)]

    def peers(self, ways: Sequence[str], pinned: Cores, repeats: int, copies: int) -> dict[str, Any]:
        """Training with saves by DCP, and copies; the last checkpoint of each way stays."""
        found = self.ranks(2, pinned, kind="train", ways=ways, saves=repeats + 1, copies=copies)
        told: dict[str, Any] = {"copy_s": {kind: slowest_of([each["copies"][kind] for each in found])
                                           for kind in found[0]["copies"]}}  # fmt: skip
        for way in ways:
            last = only_last(self.folder / f"job-{self._count}" / way)
            trained = slowest([Trained(**each[way]) for each in found])
            told[way] = figures(trained) | {"checkpoint": str(last)}
        return told

    def ours(self, pinned: Cores, repeats: int, every: int) -> dict[str, Any]:
        """Training with Headway's saves; its last checkpoint stays."""
        self._count += 1
        place = self.folder / f"job-{self._count}"
        place.mkdir()
        job = {"mb": self.mb, "data": str(self.data), "folder": str(place), "every": every}
        job |= {"steps": every * (repeats + 2), "steps_on": pinned[0], "saves_on": pinned[1]}
        (place / "job.json").write_text(json.dumps(job))
        run([[__file__, "--agent", str(place / "job.json")]], place)
        folder = RunFolder(place / "run")
        checkpoint = only_last(folder.checkpoints)
        drop_from_cache(checkpoint)
        begun = time.monotonic()
        size = verify_checkpoint(checkpoint).bytes
        told = {"verify_s": time.monotonic() - begun, "bytes": size, "checkpoint": str(checkpoint)}
        return read_ours(folder) | told

    def raw(self, size: int, repeats: int) -> dict[str, list[float]]:
        """Seconds of plain and, where the file system has that, of direct writes, in turns."""
        found: dict[str, list[float]] = {"plain": [], "direct": []}
        with mmap.mmap(-1, size) as memory:
            block = os.urandom(1 << 20)
            for begin in range(0, size, len(block)):
                memory[begin : begin + len(block)] = block
            for _ in range(repeats):
                found["plain"].append(write_raw(self.folder / "raw", memory, 0))
                with contextlib.suppress(OSError):
                    found["direct"].append(write_raw(self.folder / "raw", memory, os.O_DIRECT))
        return {kind: times for kind, times in found.items() if times}

    def load(self, mesh: dict[str, int], ours: str, peer: str, flip: bool) -> dict[str, Any]:
        """Loads into a mesh; the slowest rank counts."""
        workers, repeats = math.prod(mesh.values()), max(2, self.repeats // 2 + 1)
        found = self.ranks(
            workers, (None, None), kind="load", mesh=mesh, ours=ours, dcp=peer, repeats=repeats, flip=flip
        )
        told: dict[str, Any] = {
            way: {cache: slowest_of([each[way][cache] for each in found]) for cache in ("cold", "warm")}
            for way in ("raw", "headway", "dcp")
        }
        told["first_s"] = max(each["headway"]["first"] for each in found)
        told |= {key: max(each[key] for each in found) for key in ("read_bytes", "held_bytes")}
        return told | {"in_cache_when_cold": found[0]["in_cache_when_cold"], "flipped": found[0].get("flipped")}


def hashing(size: int) -> dict[str, float]:
    """Seconds that one core takes for the digest and the checksums of so many bytes of float32."""
    bits = np.arange(size // 4, dtype=np.uint32)
    begun = time.monotonic()
    digest_box(bits, bits.shape, Box((0,), bits.shape))
    between = time.monotonic()
    chunk_checksums(bits.view(np.uint8).data)
    return {"digest": between - begun, "checksums": time.monotonic() - between}


def measure(bench: Bench, tell: Callable[[str], None]) -> dict[str, Any]:
    """All of it, in an order that lets each part know what it needs of those before."""
    size, few = bench.mb * 2**20, max(2, bench.repeats // 2 + 1)
    tell("the bare disk")
    raw = bench.raw(size, few)
    alone = hashing(size)
    tell("DCP, saves by a thread")
    peers = bench.peers(["thread", "kept"], bench.pinned, few, copies=bench.repeats)
    tell("DCP, saves by a process")
    try:
        peers["process"] = bench.peers(["process"], bench.pinned, few, copies=0)["process"]
    except Failed as failed:  # its helpers open ports, which not every machine lets them
        tell(f"that way does not work here: {failed}")
    # As many steps between two saves as a slow write takes, and some that no write disturbs.
    every = math.ceil(2.5 * best_write(raw) / peers["kept"]["step_s"]) + 3
    tell(f"Headway, a save every {every} steps")
    ours = bench.ours(bench.pinned, bench.repeats, every)
    tell("both with nothing pinned")
    unpinned = bench.peers(["kept"], (None, None), 2, copies=2) | {"headway": bench.ours((None, None), 2, every)}
    tell("the bare disk again")
    again = bench.raw(size, few)
    tell("loads")
    places = ours["checkpoint"], peers["kept"]["checkpoint"]
    loads = {"tensor 2": bench.load({"tensor": 2}, *places, flip=False)}
    loads["one worker"] = bench.load({"shard": 1}, *places, flip=True)
    for told in (ours, unpinned["headway"], unpinned["kept"], *peers.values()):
        told.pop("checkpoint", None)  # a path of this machine, which is gone by now
    raw = {kind: raw[kind] + again[kind] for kind in raw}
    return {"hashing_s": alone, "raw_write_s": raw, "dcp": peers, "headway": ours, "unpinned": unpinned, "loads": loads}


# -- told


@dataclass(frozen=True)
class Row:
    """A line of the table, in seconds; `dcp` has what its ways took, or how many times longer its steps are."""

    what: str
    headway: float
    beside: float
    goal: float | None
    dcp: tuple[float | None, ...]
    times: bool = False
    """Whether `dcp` tells ratios."""

    @property
    def ratio(self) -> float:
        return self.headway / self.beside

    @property
    def verdict(self) -> str:
        return "" if self.goal is None else "met" if self.ratio <= self.goal else "missed"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "verdict": self.verdict}

    def __str__(self) -> str:
        goal = "" if self.goal is None else f"<={self.goal:g}"
        unit = "x" if self.times else ""
        others = "".join(f"{'-' if value is None else f'{value:.2f}{unit}':>9}" for value in self.dcp)
        return f"{self.what:34}{self.headway:8.3f}{self.beside:8.3f}{self.ratio:7.2f}{goal:>8}{self.verdict:>8}{others}"


def rows(found: dict[str, Any]) -> list[Row]:
    """What is told of what was measured."""
    ours, peers, free = found["headway"], found["dcp"], found["unpinned"]
    disk, copy = best_write(found["raw_write_s"]), peers["copy_s"]["private"]
    plain = median(found["raw_write_s"]["plain"])

    def ways(key: str) -> tuple[float | None, ...]:
        return tuple(peers.get(way, {}).get(key) for way in WAYS)

    def steps(what: str, told: dict[str, Any], key: str, goal: float | None, dcp: tuple[float | None, ...]) -> Row:
        return Row(what, told[key] * told["step_s"], told["step_s"], goal, dcp, times=True)

    table = [
        Row("stall of a step | bare copy", ours["stall_s"], copy, GOALS["stall"], ways("stall_s")),
        Row("durable | plain write, fsync", ours["durable_s"], plain, GOALS["durable"], ways("durable_s")),
        Row("durable | direct write, fsync", ours["durable_s"], disk, GOALS["durable"], ways("durable_s")),
        steps("steps that a write touches", ours, "slowdown", GOALS["steps"], ways("slowdown")),
        steps("the pace under it", ours, "pace", None, ways("pace")),
    ]
    for mesh, told in found["loads"].items():
        for cache in ("cold", "warm"):
            what = f"load, {mesh}, {cache} | raw read"
            dcp = (None, told["dcp"][cache], None)
            table.append(Row(what, told["headway"][cache], told["raw"][cache], GOALS["load"], dcp))
    ours, peer = free["headway"], free["kept"]
    stall, durable, slow = ((None, peer[key], None) for key in ("stall_s", "durable_s", "slowdown"))
    return [
        *table,
        Row("unpinned: stall | bare copy", ours["stall_s"], free["copy_s"]["private"], None, stall),
        Row("unpinned: durable | bare write", ours["durable_s"], disk, None, durable),
        steps("unpinned: steps touched", ours, "slowdown", None, slow),
    ]


def best_write(raw: dict[str, list[float]]) -> float:
    """The faster of both ways to write, by their medians."""
    return min(median(times) for times in raw.values())


def print_table(result: dict[str, Any], table: Sequence[Row]) -> None:
    print(f"\n{'':73}{'DCP':>12}")
    print(
        f"{'seconds':34}{'headway':>8}{'beside':>8}{'ratio':>7}{'goal':>8}{'':8}{'thread':>9}{'kept':>9}{'process':>9}"
    )
    for row in table:
        print(row)
    for text in notes(result):
        print(textwrap.fill(text, 99, subsequent_indent="  "))


def notes(result: dict[str, Any]) -> Iterator[str]:
    """What the table has no room for."""
    ours, flipped, mb = result["headway"], result["loads"]["one worker"]["flipped"], result["mb"]
    yield f"flipped byte, {'met' if flipped['headway'].startswith('refused') else 'missed'}: {flipped['headway']}"
    yield f"flipped byte, DCP: {flipped['dcp']}"
    yield ""
    yield (
        f"state {ours['bytes'] / 2**20:.0f} MiB; host memory held by the agent {ours['memory_bytes'] / 2**20:.0f} MiB "
        f"({ours['buffers']} buffers a worker); {ours['skipped']} saves left out"
    )
    yield (
        f"read back and verified from a cold cache in {ours['verify_s']:.2f} s; durable in "
        f"{ours['durable_at_rest_s']:.2f} s where no step runs meanwhile"
    )
    lost = ", ".join(f"{way} {result['dcp'][way]['lost_s_a_save']:.2f}" for way in WAYS if way in result["dcp"])
    alone = result["hashing_s"]
    yield f"on one core the digest of as many bytes takes {alone['digest']:.2f} s, checksums {alone['checksums']:.2f} s"
    for mesh, told in result["loads"].items():
        more = told["read_bytes"] / told["held_bytes"]
        yield f"load, {mesh}: a worker reads {more:.2f} times the bytes that it holds afterwards"
    yield f"steps lose {ours['lost_s_a_save']:.2f} s to a save beside its stall; DCP: {lost}"
    rates = ", ".join(f"{kind} {mb / median(found):.0f} MiB/s" for kind, found in result["raw_write_s"].items())
    cold = max(told["in_cache_when_cold"] for told in result["loads"].values())
    yield f"{result['file_system']}, writes with fsync: {rates}; {cold:.1%} of what is called cold was in the cache"
    pinned = "workers on one core, writers on another" if result["pinned"] else "NOTHING PINNED: there is one core"
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    yield f"{result['cores']} cores ({pinned}), {result['machine']}; {versions}; took {result['took_s']:.0f} s"


def check_room(folder: Path, mb: int, repeats: int) -> None:
    needs, free = (2 * repeats + 6) * mb, shutil.disk_usage(folder).free >> 20
    if free < needs:
        raise SystemExit(f"--mb {mb} needs {needs} MiB in {folder}, and {free} are free: --folder names another")
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = next(int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable:"))
    if memory < 5 * mb:
        raise SystemExit(f"--mb {mb} needs {5 * mb} MiB of memory, and {memory} are free")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1024, help="size of the state in MiB")
    parser.add_argument("--repeats", type=int, default=5, help="saves that count, 1 or more")
    parser.add_argument("--out", type=Path, help="where to leave the numbers, as JSON")
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="whose disk to use")
    parser.add_argument("--agent", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agent:
        train_here(json.loads(options.agent.read_text()))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # as Ctrl-C: processes and the folder go first
    check_room(options.folder, options.mb, options.repeats)
    begun = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {what}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="headway-state-", dir=options.folder, ignore_cleanup_errors=True) as name:
        bench = Bench(Path(name), options.mb, options.repeats)
        result = measure(bench, tell)
        result["file_system"] = file_system(Path(name))
    names = ("torch", "numpy", "xxhash")
    result |= {
        "mb": options.mb,
        "repeats": options.repeats,
        "cores": os.cpu_count(),
        "pinned": bench.pinned[0] is not None,
        "machine": platform.machine(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "took_s": time.monotonic() - begun,
    }
    table = rows(result)
    print_table(result, table)
    if options.out:
        options.out.write_text(json.dumps(result | {"table": [row.as_dict() for row in table]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
