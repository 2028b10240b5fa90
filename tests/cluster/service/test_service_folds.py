"""Folds of the record: what is started from one decides as if it had read every line."""

import json
import sqlite3
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

import test_service_api
from sim_world import World
from test_service_api import Api

from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.decider import DeciderProcess, InProcessDecider
from headway.cluster.service.folds import move_history, read_history, take_fold
from headway.cluster.service.grants import encode
from headway.cluster.service.live_state import LiveState
from headway.cluster.service.messages import StartReport
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.store import DamagedRecord, ServiceStore
from headway.cluster.service.tables import open_database, sqlite_url

api, database = test_service_api.api, test_service_api.database


def decided_again(state: LiveState, line: Any) -> list[Any]:
    return list(json.loads(json.dumps([encode(decision) for decision in state.decide(line["at"])])))


def live(api: Api, jobs: int) -> None:
    """Jobs are queued, run and end."""
    for _ in range(jobs):
        api.submit(gpus=1)
        starts = [*api.sync(), *api.sync(node="n2")]
        for start in starts:
            node = start.machines[0]
            api.sync(StartReport(start.key, "exited", RankResult(0)), node=node)


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_state_read_from_a_fold_decides_the_rest_of_the_record_alike(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    for _ in range(80):
        world.tick()
    world.finish()
    assert world.plane is not None
    lines, rng = list(world.plane.lines), Random(seed)
    folded, compared = LiveState(), 0
    for line in lines:
        if "decided" in line:
            assert decided_again(folded, line) == line["decided"], line["at"]
            compared += 1
        folded.apply(line)
        if rng.random() < 0.2:
            folded = LiveState.from_json(folded.to_json())
    assert compared > 5
    world.engine.dispose()


def test_service_starts_from_its_fold_and_the_lines_after_it(api: Api, database: Path, tmp_path: Path) -> None:
    live(api, 2)
    api.submit(gpus=2)
    (start,) = api.sync()
    fold = take_fold(api.plane._store)
    assert fold is not None
    assert take_fold(api.plane._store) is None
    whole = len(api.plane.lines)
    api.submit(gpus=2, site={"priority": "3"})
    api.sync(StartReport(start.key, "running"))
    later = ServiceStore(open_database(sqlite_url(database)))
    assert (later.lines.first, len(later.lines)) == (fold.seq, len(api.plane.lines))
    assert fold.seq == whole
    assert later.lines[fold.seq :] == api.plane.lines[fold.seq :]
    from_fold, process = InProcessDecider(), DeciderProcess()
    try:
        now = api.plane.now_s + 100
        whole_state = LiveState()
        whole_state.apply_all(read_history(later, tmp_path))
        assert from_fold.decide(later.lines, now) == whole_state.decide(now) == process.decide(later.lines, now)
    finally:
        process.close()
        later.close()


def test_running_service_goes_on_over_a_fold(api: Api) -> None:
    live(api, 1)
    take_fold(api.plane._store)
    live(api, 1)
    assert [row["state"] for row in api.get("/api/v1/jobs?over=true")] == ["finished", "finished"]
    answer = api.get("/api/v1/events")
    assert answer["after"] == len(api.plane.lines)
    assert {event["job"] for event in answer["events"]} == {"2"}


def test_history_is_moved_to_files_and_stays_one_provable_chain(api: Api, database: Path, tmp_path: Path) -> None:
    whole, history = list[Any](), tmp_path / "history"
    for _ in range(3):
        live(api, 1)
        before = [*read_history(api.plane._store, history)]
        assert before[: len(whole)] == whole
        whole = before
        take_fold(api.plane._store)
        move_history(api.plane._store, history)
    assert [*read_history(api.plane._store, history)] == whole
    files = sorted(history.iterdir())
    assert len(files) == 2
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT min(seq) FROM record").fetchone()[0] > 1
        assert connection.execute("SELECT count(*) FROM folds").fetchone()[0] == 2
    connection.close()
    state = LiveState()
    for line in whole:
        assert "decided" not in line or decided_again(state, line) == line["decided"]
        state.apply(line)
    files[0].unlink()
    with pytest.raises(DamagedRecord, match="line 1 of the record"):
        list(read_history(api.plane._store, history))


def test_damaged_fold_is_passed_over_for_the_one_before_it(api: Api, database: Path) -> None:
    live(api, 1)
    first = take_fold(api.plane._store)
    live(api, 1)
    second = take_fold(api.plane._store)
    assert first is not None
    assert second is not None
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE folds SET state = x'00' WHERE seq = ?", (second.seq,))
    connection.close()
    later = ServiceStore(open_database(sqlite_url(database)))
    assert (later.lines.first, len(later.lines)) == (first.seq, len(api.plane.lines))
    later.close()


def test_full_cycle_runs_on_a_restarted_service(api: Api, database: Path) -> None:
    live(api, 1)
    take_fold(api.plane._store)
    from headway.cluster.service.messages import NodeReport
    from headway.cluster.service.plane import ControlPlane

    store = ServiceStore(open_database(sqlite_url(database)))
    plane, decider = ControlPlane(store), InProcessDecider()
    plane.set_cluster(test_service_api.SPECS, [{"name": "default"}], "headway")
    for node in ("n1", "n2"):
        plane.sync(NodeReport(node))
    plane.submit(test_service_api.LaunchRequest("again", ("true",), Path("/tmp"), gpus=2))
    assert run_cycle(plane, decider).started == 1
    store.close()
