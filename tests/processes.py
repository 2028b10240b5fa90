"""Stories told by several processes that form a group: for tests of what only ranks together can do."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "headway.parallel", "headway.state.tensors", "pytest"]
"""Building an optimizer imports dynamo, and finding a story imports its test file."""
PATIENCE_S = 480


def run_ranks(folder: Path, world: int, story: Callable[..., Any], *args: Any) -> list[dict[str, torch.Tensor]]:
    """Call `story(rank, world, *args)` in so many processes that form a group; what each returns, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    place = folder / f"ranks-{len(list(folder.glob('ranks-*')))}"
    place.mkdir(parents=True)
    processes = [context.Process(target=_rank, args=(rank, world, place, story, args)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    failures = [path.read_text() for path in sorted(place.glob("failed-*"))]
    assert not failures, "\n".join(failures)
    assert not stuck, f"{len(stuck)} of {world} processes did not end"
    codes = [process.exitcode for process in processes]
    assert codes == [0] * world, f"exit statuses {codes}"
    return [load_file(place / f"{rank}.safetensors") for rank in range(world)]


def _rank(rank: int, world: int, place: Path, story: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(place / "store"), world), rank=rank, world_size=world)
        result = story(rank, world, *args) or {}
        save_file({name: tensor.contiguous() for name, tensor in result.items()}, place / f"{rank}.safetensors")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (place / f"failed-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
