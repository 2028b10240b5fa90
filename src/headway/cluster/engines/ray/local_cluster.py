"""A Ray cluster of this machine alone, for whoever has none: started once, on loopback, and left running."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from headway.errors import EngineError

__all__ = ["LOOPBACK", "started_here"]

START_S = 60.0
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""The first is Ray's switch for machines that are no cluster: everything listens on 127.0.0.1 only."""


def started_here() -> str:
    """The address of the cluster that runs on this machine; one is started if none does."""
    found = _recorded()
    if found is not None:
        return found
    port = _free_port()
    words = ["start", "--head", "--node-ip-address", "127.0.0.1", "--port", str(port), "--include-dashboard", "false"]
    words += ["--ray-client-server-port", str(_free_port()), "--disable-usage-stats"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            env={**os.environ, **LOOPBACK, "RAY_worker_niceness": "0", "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"a Ray cluster on this machine did not start within {START_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise EngineError(
            f"a Ray cluster could not be started on this machine: {last}", hint="ray start --head says more"
        )
    return f"127.0.0.1:{port}"


def _recorded() -> str | None:
    """The cluster that Ray remembers to have started here last, if it still listens."""
    from ray._common.utils import get_ray_address_file

    try:
        address = Path(get_ray_address_file(None)).read_text().strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=2):
            return address
    except (OSError, ValueError):
        return None


def _free_port() -> int:
    """One above 20000, where nothing usual listens."""
    while True:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = int(taken.getsockname()[1])
        if port >= 20000:
            return port
