"""Every kernel compiles for Hopper, here, without a GPU, and none spills much."""

import json
import os
import subprocess
import sys

import pytest

from headway.kernels.compile_ahead import everything

NAMES = [one.name for one in everything()]


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> dict[str, dict[str, int]]:
    """What a process without the interpreter compiled: all that the tests of this session ask for."""
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, "-m", "headway.kernels.compile_ahead", *chosen],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    return {one["name"]: one for one in map(json.loads, told.stdout.splitlines())}


def test_names_are_unique() -> None:
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_and_fits(made: dict[str, dict[str, int]], name: str) -> None:
    one = made[name]
    assert 0 < one["registers"] <= 255
    assert one["spilled_bytes"] <= 64
    assert one["shared_bytes"] <= 227 * 1024
