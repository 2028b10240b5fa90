"""Stories told by several processes that form a group: for tests of what only ranks together can do."""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
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
PR_SET_PDEATHSIG = 1


def run_ranks(folder: Path, world: int, story: Callable[..., Any], *args: Any) -> list[dict[str, torch.Tensor]]:
    """Call `story(rank, world, *args)` in so many processes that form a group; what each returns, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    place = folder / f"ranks-{len(list(folder.glob('ranks-*')))}"
    place.mkdir(parents=True)
    group = context.Process(target=_group, args=(world, place, story, args))
    group.start()
    group.join(PATIENCE_S)
    stuck = group.is_alive()
    if stuck:
        group.kill()
        group.join()
    failures = [path.read_text() for path in sorted(place.glob("failed-*"))]
    assert not failures, "\n".join(failures)
    assert not stuck, f"the {world} processes did not end within {PATIENCE_S} s"
    codes = json.loads((place / "codes").read_text())
    assert codes == [0] * world, f"exit statuses {codes}"
    return [load_file(place / f"{rank}.safetensors") for rank in range(world)]


def _group(world: int, place: Path, story: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Fork the ranks from one process, which has imported the story's file for all of them."""
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if sys.platform == "linux":
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a group that is killed takes all along
                _rank(rank, world, place, story, args)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    (place / "codes").write_text(json.dumps(codes))


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
