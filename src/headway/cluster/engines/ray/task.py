"""The Ray task that runs in each bundle of a job: has the command run, and forwards messages to it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from headway.cluster.engines.engine import read_exit_report
from headway.cluster.engines.ray import command_runner
from headway.track.access import umask_of
from headway.track.run_folder import create_private_folder

SOON_S, LATER_S = 0.01, 0.2
"""How often to check whether the command has exited: at first, and after a while."""
RAY_VARIABLES = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that Ray sets for its own workers, not meant for commands."""


def run_command(controller: Any, job: str, number: int, rank: int) -> dict[str, Any]:
    """Wait for the other tasks, run the command to its end, and report how it ended."""
    import ray

    order = ray.get(controller.arrive.remote(job, number, rank, ray.get_runtime_context().get_node_id()))
    if order is None:
        return {"lost": "called off"}
    try:
        create_private_folder(Path(order["folder"]))  # where no folder is shared
        with umask_of(Path(order["folder"])):
            Path(order["log"]).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return {"error": f"{error.filename}: {error.strerror} on {os.uname().nodename}"}
    gpus = ",".join(map(str, ray.get_gpu_ids())) if order["gpus"] else ""  # no others are visible
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(RAY_VARIABLES)}
    order["environment"] = inherited | {"CUDA_VISIBLE_DEVICES": gpus} | order["environment"]
    with _runner(order) as process:
        try:
            _forward_messages(controller, job, number, process)
        except ray.exceptions.RayError:
            return {"lost": "its controller died"}  # the next one restarts the job; the runner kills the command
        error_text = process.stdout.read().decode().strip() if process.stdout else ""
        if error_text:
            return {"error": f"{error_text} on {os.uname().nodename}"}
        status = process.wait()
        reported, suspects = read_exit_report(Path(order["environment"]["HEADWAY_END"])) or (None, ())
        return {"exit": status, "said": reported, "suspects": suspects}


def _forward_messages(controller: Any, job: str, number: int, process: "subprocess.Popen[bytes]") -> None:
    """Forward the controller's messages to the command until it exits."""
    import ray

    seen, pause = 0, SOON_S
    pending = controller.wish.remote(job, number, seen)
    while process.poll() is None:
        if not ray.wait([pending], timeout=pause)[0]:
            pause = min(LATER_S, pause * 1.2)
            continue
        messages = ray.get(pending)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"".join(to_json(message) + b"\n" for message in messages))
            process.stdin.flush()
        seen += len(messages)
        pending = controller.wish.remote(job, number, seen)


@contextlib.contextmanager
def _runner(order: dict[str, Any]) -> Iterator["subprocess.Popen[bytes]"]:
    """The command runner of a command. Leaving closes its standard input, which kills whatever still runs."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", command_runner.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(to_json(order) + b"\n")
        process.stdin.flush()
        yield process
