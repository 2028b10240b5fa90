"""Every kernel compiles for Hopper, here, without a GPU, and none spills much."""

import json
import os
import subprocess
import sys

import pytest

from headway.kernels.compile_ahead import everything

NAMES = [kernel.name for kernel in everything()]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, dict[str, int]]:
    """What a process without the interpreter compiled: all that the tests of this session ask for."""
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "headway.kernels.compile_ahead", *chosen],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return {report["name"]: report for report in map(json.loads, process.stdout.splitlines())}


def test_names_are_unique() -> None:
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_and_fits(compiled: dict[str, dict[str, int]], name: str) -> None:
    report = compiled[name]
    assert 0 < report["registers"] <= 255
    assert report["spilled_bytes"] <= 64
    assert report["shared_bytes"] <= 227 * 1024
