"""A Ray cluster on this machine alone: started once, on loopback, and left running."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from headway.errors import EngineError

START_S = 60.0
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""The first is Ray's switch for single machines: everything listens on 127.0.0.1 only."""


def start_local_cluster() -> str:
    """Start a cluster on this machine, and return its address."""
    port = _free_port()
    options = ["--head", "--node-ip-address", "127.0.0.1", "--port", str(port), "--include-dashboard", "false"]
    options += ["--ray-client-server-port", str(_free_port()), "--disable-usage-stats"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *options],
            env={**os.environ, **LOOPBACK, "RAY_worker_niceness": "0", "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"the Ray cluster on this machine did not start within {START_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise EngineError(
            f"cannot start a Ray cluster on this machine: {last}", hint="run ray start --head for details"
        )
    return f"127.0.0.1:{port}"


def recorded_address() -> str | None:
    """The address of the cluster that was last started on this machine, alive or not; None if there was none."""
    from ray._common.utils import get_ray_address_file

    try:
        return Path(get_ray_address_file(None)).read_text().strip() or None
    except OSError:
        return None


def _free_port() -> int:
    """A free port above 20000, away from well-known services."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port >= 20000:
            return port
