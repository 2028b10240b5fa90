"""Benchmarks collectives between the devices of this machine, with one process per device.

`python -m headway.measure.collectives` reads one JSON object on standard input, {"rank", "ranks", "device",
"rendezvous", "sizes"}; rank 0 writes one line, {"collectives": [...]}. `collectives` starts all ranks.
"""

import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from headway.errors import RunError
from headway.hardware.ceilings import CollectiveCurve
from headway.measure.operations import to_microseconds
from headway.measure.timer import DeviceTimer

TIMEOUT_S = 120.0
Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


def collectives(kind: str, ranks: int, sizes: Sequence[int]) -> list[CollectiveCurve]:
    """Start a process per device, and measure."""
    with tempfile.TemporaryDirectory() as folder:
        requests = [
            {"rank": rank, "ranks": ranks, "device": kind, "rendezvous": f"{folder}/store", "sizes": list(sizes)}
            for rank in range(ranks)
        ]
        workers = [_start(request, Path(folder)) for request in requests]
        try:
            answer, _ = workers[0].communicate(timeout=TIMEOUT_S)
            failed = [rank for rank, worker in enumerate(workers) if worker.wait(timeout=TIMEOUT_S)]
        except subprocess.TimeoutExpired:
            failed = [rank for rank, worker in enumerate(workers) if worker.poll() is None]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        if failed:
            log = (Path(folder) / f"log-{failed[0]}").read_text(errors="replace").strip().splitlines()
            reason = log[-1] if log else "no answer"
            raise RunError(f"measuring collectives failed on device {failed[0]}: {reason}")
    return [CollectiveCurve.model_validate(curve) for curve in json.loads(answer)["collectives"]]


def _start(request: dict[str, Any], folder: Path) -> "subprocess.Popen[str]":
    log = (folder / f"log-{request['rank']}").open("w")
    with log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "headway.measure.collectives"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if request["rank"] == 0 else subprocess.DEVNULL,
            stderr=log,
            text=True,
        )
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(request))
    worker.stdin.close()
    worker.stdin = None  # communicate would flush it again
    return worker


def measure_together(
    rank: int, ranks: int, timer: DeviceTimer, backend: str, sizes: Sequence[int]
) -> list[CollectiveCurve]:
    """Measure every operation at every size, on one rank."""
    curves = []
    for operation in get_args(Operation):
        times = []
        for size in sizes:
            work = _work(operation, rank, ranks, max(1, size // (4 * ranks)), timer.device)
            seconds = torch.tensor([_fixed_repeats(work, timer)])
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times.append(to_microseconds(float(seconds)))
        sizes_moved = tuple(max(1, size // (4 * ranks)) * 4 * ranks for size in sizes)
        curves.append(
            CollectiveCurve(
                operation=operation, ranks=ranks, backend=backend, bytes=sizes_moved, microseconds=tuple(times)
            )
        )
    return curves


def _fixed_repeats(work: Callable[[], object], timer: DeviceTimer, repeats: int = 5, groups: int = 5) -> float:
    """Seconds per call; every rank makes the same number of calls, or they would deadlock."""
    for _ in range(2):
        work()
    taken = sorted(timer.repeated_seconds(lambda _: work(), repeats) for _ in range(groups))
    return taken[groups // 2]


def _work(operation: Operation, rank: int, ranks: int, share: int, device: torch.device) -> Callable[[], object]:
    """A call of the collective on random data, `share` elements per rank."""
    part, first, second = (torch.empty(n, device=device).normal_() for n in (share, share * ranks, share * ranks))
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def send() -> None:
        """To the next rank, all at once, as in a pipeline or ring."""
        ahead = dist.P2POp(dist.isend, first, (rank + 1) % ranks)
        behind = dist.P2POp(dist.irecv, second, (rank - 1) % ranks)
        for request in dist.batch_isend_irecv([ahead, behind]):
            request.wait()

    calls: dict[Operation, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(first, dist.ReduceOp.MAX),  # repeated sums would overflow
        "all_gather": lambda: gather(first, part),
        "reduce_scatter": lambda: scatter(part, first),
        "all_to_all": lambda: dist.all_to_all_single(second, first),
        "send": send,
    }
    return calls[operation]


def main() -> int:
    """Serve one request as one rank."""
    request = json.load(sys.stdin)
    rank, ranks = request["rank"], request["ranks"]
    on_gpu = request["device"] == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.FileStore(request["rendezvous"], ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
        device_id=device if on_gpu else None,
    )
    curves = measure_together(rank, ranks, DeviceTimer(device), "nccl" if on_gpu else "gloo", request["sizes"])
    if rank == 0:
        print(json.dumps({"collectives": [collective.model_dump() for collective in curves]}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
