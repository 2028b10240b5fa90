"""How fast the loader is, beside the usual ways to read tokens from a memory map.

    python benchmarks/loader.py [--json] [--tokens 50000000] [--seq 2048] [--batch 8]

All read the same file from the page cache and hand out int64 inputs and labels: NumPy arrays in the rows
`headway` and `bare row copy`, torch tensors in the others (Headway's through the buffers that the trainer
uses). Repeats are interleaved, so that a noisy neighbour hurts all alike; the median is shown. CPU time
counts every process of a contestant.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from headway.data import Loader, ShardWriter, WindowReader, finish_dataset, open_dataset, split_windows, train_tokenizer
from headway.train.feed import DeviceFeed

END_OF_TEXT = 0
NUMPY, TENSORS, MASKS, DOCUMENTS, BARE = (
    "headway",
    "headway, as torch tensors",
    "headway, boundaries masked",
    "headway, documents numbered",
    "bare row copy",
)
GIVE_ARRAYS = {NUMPY, MASKS, DOCUMENTS, BARE}
"""These hand out NumPy arrays; all others are compared with Headway's torch tensors."""


def make_dataset(folder: Path, tokens: int) -> None:
    """Random tokens in documents of about a thousand, through the writer that builds use."""
    rng = np.random.default_rng(0)
    tokenizer = train_tokenizer(["a little text"], 300)
    writer = ShardWriter(folder, dtype="uint16", end_of_text=END_OF_TEXT, shard_tokens=100_000_000)
    while writer.tokens < tokens:
        writer.add(rng.integers(1, 300, int(rng.integers(500, 1500)), dtype=np.uint16))
        writer.end_document()
    finish_dataset(folder, writer, vocab_size=300, tokenizer=tokenizer.to_bytes())


class Windows(TorchDataset):
    """The same windows as a map-style data set, the textbook way."""

    def __init__(self, data: np.ndarray, seq: int) -> None:
        self.data, self.seq = data, seq

    def __len__(self) -> int:
        return len(self.data) // (self.seq + 1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * (self.seq + 1)
        row = torch.from_numpy(self.data[start : start + self.seq + 1].astype(np.int64))
        return row[:-1], row[1:]


def headway(
    folder: Path, seq: int, batch: int, tensors: bool = False, mask_boundaries: bool = False, documents: bool = False
) -> Iterator[object]:
    dataset = open_dataset(folder)
    reader = WindowReader(dataset, seq, mask_boundaries, documents=documents)
    loader = Loader(reader, split_windows(reader.windows, 0.01, dataset.version), seed=0, batch=batch)
    source = DeviceFeed(loader, torch.device("cpu")) if tensors else loader
    cursor = 0
    while True:
        yield source.read(cursor)
        cursor += batch


def bare_copy(folder: Path, seq: int, batch: int) -> Iterator[object]:
    """The floor: rows copied one by one out of a plain array, at places drawn beforehand."""
    data = open_dataset(folder).tokens[0]
    places = np.random.default_rng(0).integers(0, len(data) - seq - 1, (4096, batch)).tolist()
    while True:
        for starts in places:
            out = np.empty((batch, seq + 1), dtype=np.int64)
            for i, start in enumerate(starts):
                out[i] = data[start : start + seq + 1]
            yield out


def nanogpt_style(folder: Path, seq: int, batch: int, tuned: bool) -> Iterator[object]:
    """Random places with replacement, two conversions and two stacks a batch.

    As usually written it slices np.memmap with 0-d tensors, which costs more than the copying. `tuned` is the same
    idea over a plain array and integers, so that nobody is compared with an accident of spelling only.
    """
    mapped = np.memmap(folder / "tokens-00000.bin", dtype=np.uint16, mode="r")
    data = mapped.view(np.ndarray) if tuned else mapped
    while True:
        ix = torch.randint(len(data) - seq, (batch,))
        places = ix.tolist() if tuned else ix
        x = torch.stack([torch.from_numpy(data[i : i + seq].astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + seq].astype(np.int64)) for i in places])
        yield x, y


def torch_loader(folder: Path, seq: int, batch: int, workers: int) -> Iterator[object]:
    windows = Windows(open_dataset(folder).tokens[0], seq)
    while True:
        yield from DataLoader(windows, batch_size=batch, shuffle=True, num_workers=workers, drop_last=True)


def cpu_seconds() -> float:
    own, children = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def rate(batches: Iterator[object], count: int, tokens: int) -> tuple[float, float]:
    """(tokens a CPU-second, tokens a second) over `count` batches, once a tenth of them has warmed it up."""
    for _ in range(count // 10):
        next(batches)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        next(batches)
    return count * tokens / (time.process_time() - cpu), count * tokens / (time.perf_counter() - wall)


def rate_with_children(make: Callable[[], Iterator[object]], count: int, tokens: int) -> tuple[float, float]:
    """As `rate`, for a loader with worker processes, whose CPU time is known only once they have ended.

    A short run is taken off a long one, so that starting and ending the workers is not held against them.
    """
    short = count // 10
    (cpu_a, wall_a), (cpu_b, wall_b) = (_spent(make(), batches) for batches in (short, count + short))
    return count * tokens / (cpu_b - cpu_a), count * tokens / (wall_b - wall_a)


def _spent(batches: Iterator[object], count: int) -> tuple[float, float]:
    cpu, wall = cpu_seconds(), time.perf_counter()
    for _ in range(count):
        next(batches)
    batches.close()  # type: ignore[attr-defined]
    return cpu_seconds() - cpu, time.perf_counter() - wall


FIRST_BATCH = """
import sys, time, torch
start = time.perf_counter()
from headway.data import Loader, WindowReader, open_dataset, split_windows
dataset = open_dataset(sys.argv[1])
reader = WindowReader(dataset, int(sys.argv[2]))
loader = Loader(reader, split_windows(reader.windows, 0.01, dataset.version), 0, int(sys.argv[3]))
torch.from_numpy(loader.read(0).inputs)
print(time.perf_counter() - start)
"""


def first_batch_s(folder: Path, seq: int, batch: int) -> float:
    """From nothing but torch imported to the first batch, in a fresh process."""
    command = [sys.executable, "-c", FIRST_BATCH, str(folder), str(seq), str(batch)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def resume_s(folder: Path, seq: int, batch: int, step: int) -> float:
    """From a closed data set to the batch of a given step."""
    start = time.perf_counter()
    dataset = open_dataset(folder)
    reader = WindowReader(dataset, seq)
    loader = Loader(reader, split_windows(reader.windows, 0.01, dataset.version), seed=0, batch=batch)
    loader.read(step * batch)
    return time.perf_counter() - start


def measure(folder: Path, seq: int, batch: int, batches: int, repeats: int) -> dict[str, object]:
    contestants: dict[str, Callable[[], tuple[float, float]]] = {}

    def enter(name: str, make: Callable[..., Iterator[object]], share: float = 1.0, **options: object) -> None:
        count = int(batches * share)
        contestants[name] = lambda: rate(make(folder, seq, batch, **options), count, seq * batch)

    enter(NUMPY, headway)
    enter(TENSORS, headway, tensors=True)
    enter(MASKS, headway, 0.5, mask_boundaries=True)
    enter(DOCUMENTS, headway, 0.5, documents=True)
    enter(BARE, bare_copy)
    enter("nanoGPT-style, as written", nanogpt_style, 0.25, tuned=False)
    enter("nanoGPT-style, tuned", nanogpt_style, 0.5, tuned=True)
    enter("torch DataLoader, 0 workers", torch_loader, 0.25, workers=0)
    contestants["torch DataLoader, 2 workers"] = lambda: rate_with_children(
        lambda: torch_loader(folder, seq, batch, workers=2), batches // 4, seq * batch
    )
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            seen[name].append(run())
    rates = {
        name: {
            "tokens_per_cpu_s": statistics.median(cpu for cpu, _ in found),
            "tokens_per_s": statistics.median(wall for _, wall in found),
        }
        for name, found in seen.items()
    }
    steps = (0, 1, 1000, 10**6, 10**9)
    return {
        "rates": rates,
        "first_batch_s": statistics.median(first_batch_s(folder, seq, batch) for _ in range(3)),
        "resume_s": {str(s): statistics.median(resume_s(folder, seq, batch, s) for _ in range(5)) for s in steps},
    }


def print_table(result: dict, arguments: argparse.Namespace) -> None:
    print(f"seq {arguments.seq}, batch {arguments.batch}, int64, page cache; million tokens, median\n")
    print(f"{'':30}{'per CPU-second':>16}{'per second':>13}{'headway is':>13}")
    for name, found in result["rates"].items():
        own = result["rates"][NUMPY if name in GIVE_ARRAYS else TENSORS]["tokens_per_cpu_s"]
        cpu, wall = found["tokens_per_cpu_s"], found["tokens_per_s"]
        print(f"{name:30}{cpu / 1e6:16,.0f}{wall / 1e6:13,.0f}{own / cpu:12.2f}x")
    print(f"\nfirst batch, torch imported    {result['first_batch_s'] * 1e3:8.1f} ms")
    for step, found in result["resume_s"].items():
        print(f"open and resume at step {int(step):<7.0e}{found * 1e3:8.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--batches", type=int, default=4000, help="batches a repeat (fewer for slow ones)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_dataset(Path(folder), arguments.tokens)
        result = measure(Path(folder), arguments.seq, arguments.batch, arguments.batches, arguments.repeats)
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine()}
        versions = {"torch": torch.__version__, "numpy": np.__version__}
        print(json.dumps({**vars(arguments), **machine, **versions, **result}, indent=2))
    else:
        print_table(result, arguments)


if __name__ == "__main__":
    main()
