"""What runs in each bundle of a job on a Ray cluster: a task that has one command run, and passes on what is wished."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from headway.cluster.engines.engine import read_end
from headway.cluster.engines.ray import command_runner as guard

__all__ = ["run_command"]

SOON_S, LATER_S = 0.01, 0.2
"""How often to see whether the command has ended: at first, and when it has run for long."""
OF_RAY = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that Ray sets for its own workers: no command's business."""


def run_command(owner: Any, job: str, number: int, rank: int) -> dict[str, Any]:
    """Wait for the others, run the command to its end, tell how it ended."""
    import ray

    order = ray.get(owner.arrive.remote(job, number, rank, ray.get_runtime_context().get_node_id()))
    if order is None:
        return {"lost": "called off"}
    try:
        Path(order["log"]).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return {"error": f"{error.filename}: {error.strerror} on {os.uname().nodename}"}
    order["environment"] = _environment() | _gpus(order, ray) | order["environment"]
    with _guarded(order) as process:
        try:
            _pass_on(owner, job, number, process)
        except ray.exceptions.RayError:
            return {"lost": "its owner died"}  # what follows that one starts the job again; the guard ends the command
        said = process.stdout.read().decode().strip() if process.stdout else ""
        if said:
            return {"error": f"{said} on {os.uname().nodename}"}
        status = process.wait()
        whole, suspects = read_end(Path(order["environment"]["HEADWAY_END"])) or (None, ())
        return {"exit": status, "said": whole, "suspects": suspects}


def _pass_on(owner: Any, job: str, number: int, process: "subprocess.Popen[bytes]") -> None:
    """Until the command ends, tell it what it is to hear."""
    import ray

    seen, pause = 0, SOON_S
    asked = owner.wish.remote(job, number, seen)
    while process.poll() is None:
        if not ray.wait([asked], timeout=pause)[0]:
            pause = min(LATER_S, pause * 1.2)
            continue
        words = ray.get(asked)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"".join(to_json(word) + b"\n" for word in words))
            process.stdin.flush()
        seen += len(words)
        asked = owner.wish.remote(job, number, seen)


@contextlib.contextmanager
def _guarded(order: dict[str, Any]) -> Iterator["subprocess.Popen[bytes]"]:
    """The command's guard. Whoever leaves closes its line, and with it ends what still runs."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(to_json(order) + b"\n")
        process.stdin.flush()
        yield process


def _environment() -> dict[str, str]:
    """This machine's own variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_RAY)}


def _gpus(order: dict[str, Any], ray: Any) -> dict[str, str]:
    """Only the GPUs that were reserved can be seen; none where none was asked for."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ray.get_gpu_ids())) if order["gpus"] else ""}
