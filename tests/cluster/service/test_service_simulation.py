"""The service in a simulated world, over seeds: nothing is lost, started twice, over-allocated or started in part."""

import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from sim_world import World

from headway.cluster.service.grants import encode
from headway.cluster.service.live_state import LiveState


def lived(folder: Path, seed: int, ticks: int, url: str = "") -> World:
    world = World(folder, seed, url)
    for _ in range(ticks):
        world.tick()
    world.finish()
    world.check_ends()
    assert world.plane is not None
    check_record(world)
    world.engine.dispose()
    return world


def check_record(world: World) -> None:
    """Every cycle is decided again, with the same decisions; at the end nothing is held, and snapshots are exact."""
    assert world.plane is not None
    state = LiveState()
    for line in world.plane.lines:
        world.seen["resized"] += sum(decision["kind"] == "resize" for decision in line.get("decided", ()))
        if "decided" in line:
            today = [encode(decision) for decision in state.decide(line["at"])]
            assert json.loads(json.dumps(today)) == line["decided"]
        state.apply(line)
    assert not state.holdings.grants
    assert (state.snapshot.nodes.free[:3] == 4).all()
    assert (state.snapshot.nodes.cpus_free[:3] == 8).all()
    assert not len(state.snapshot.active)
    assert not state.snapshot.ending


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_each_job_runs_and_ends_once(tmp_path: Path, seed: int) -> None:
    world = lived(tmp_path, seed, 120)  # which checks what must hold after every event
    assert world.seen["started"] > 0


@pytest.mark.slow
def test_many_random_schedules_of_faults(tmp_path: Path) -> None:
    total = Counter[str]()
    for seed in range(100, 160):
        total += lived(tmp_path, seed, 200).seen
    for what in ("started", "preempted", "service crashes", "node crashes", "reboots", "superseded", "given up"):
        assert total[what] > 20, total
    assert total["resized"] > 20, total
    assert total["11 GPUs on 3 nodes"] > 5, total
