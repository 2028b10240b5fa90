"""A Ray cluster for tests: three nodes on this machine, on loopback, without leftovers."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["CPUS", "GPUS", "HEAD", "NODES", "RayCluster", "ray_cluster"]

NODES, CPUS, GPUS = 3, 3, 2
HEAD = "m0"
"""The node that the cluster cannot lose."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class RayCluster:
    """The nodes m0 (the head), m1 and m2."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process, self.folder = process, folder
        self.address = self._read_line()

    def send(self, command: str) -> None:
        """`add NAME` or `remove NAME`, done when this returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._read_line() == command

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, f"the Ray cluster did not start:\n{(self.folder / 'errors').read_text()[-3000:]}"
        return line


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A running cluster, for this process to connect to. Its folder has a short path, as sockets need."""
    try:
        os.environ.update(LOOPBACK)  # before the import of Ray, which reads them once
        import ray
    except ImportError:
        pytest.skip("Ray is not installed: pip install 'headway[ray]'")
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "ray_nodes.py"), str(folder / "ray"), str(CPUS), str(GPUS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        cluster = RayCluster(process, folder)
        cluster.send("add " + ",".join(f"m{number}" for number in range(1, NODES)))
        yield cluster
    finally:
        ray.shutdown()
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)
