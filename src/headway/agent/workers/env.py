"""Environment variables of worker processes."""

import os
import sys
from collections.abc import Mapping

from headway.agent.attempt import Attempt
from headway.hardware.network import find_network, transport
from headway.state.handshake import KEY_VARIABLE


def worker_environment(attempt: Attempt) -> dict[str, str]:
    """Return the environment of workers on this machine."""
    return without_key(os.environ) | worker_variables(attempt)


def without_key(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop the run's key from an environment: processes that need it receive it explicitly."""
    return {name: value for name, value in environment.items() if name != KEY_VARIABLE}


def worker_variables(attempt: Attempt) -> dict[str, str]:
    """Bind workers to loopback and to a thread count, which bit-exact results depend on."""
    threads = str(attempt.threads)
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # How often a compute thread looks for the others before it sleeps. By default it looks for milliseconds: where
        # other processes want the cores, a step of a small model on two of them took seven times the CPU time.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),
        "PYTHONUNBUFFERED": "1",
        # On ARM oneDNN otherwise leaves /tmp/perf-PID.map, which only profilers read, behind every worker.
        "ONEDNN_JIT_PROFILE": "0",
        # Workers import installed packages and PYTHONPATH, not whatever is in the current directory.
        "PYTHONSAFEPATH": "1",
        # With deterministic = true cuBLAS needs this before its first call; it costs nothing otherwise.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Back large tensors with 2 MiB pages: in a step of a large model on a CPU every intermediate is new memory, and
        # the kernel took longer to hand out 4 KiB pages than the model took to use them.
        "THP_MEM_ALLOC_ENABLE": "1",
    }


def network_variables(name: str, host: str) -> dict[str, str]:
    """Choose the transport between machines as `headway doctor --network` does, over the interface of this node's
    agent, and log the choice."""
    choice = transport(find_network(), host=host)
    variables = ", ".join(f"{key}={value}" for key, value in choice.variables.items())
    preset = f"; set before: {', '.join(choice.kept)}" if choice.kept else ""
    print(f"{name}: between machines {choice.name} ({choice.why}): {variables}{preset}", file=sys.stderr, flush=True)
    return dict(choice.variables)
