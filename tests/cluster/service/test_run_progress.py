"""Runs report their steps and saves, and preemption loses what is not saved."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sqlalchemy")

import test_service_api
from test_service_api import Api

from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.messages import StartReport
from headway.cluster.service.run_progress import TAIL_BYTES, RunProgress, read_progress

api, database = test_service_api.api, test_service_api.database


def run_folder(folder: Path, steps: list[int], saved: list[int], attempt: int = 1) -> Path:
    (folder / "events").mkdir(parents=True, exist_ok=True)
    (folder / "recipe.json").write_text("{}")
    lines = [json.dumps({"kind": "step", "t": 1, "step": step, "data": 1, "compute": 2}) for step in steps]
    (folder / f"events/{attempt:04}-rank-0.jsonl").write_text("\n".join(['{"format": 1}', *lines, '{"kind": "st']))
    for step in saved:
        checkpoint = folder / f"checkpoints/step-{step:08}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    return folder


def test_progress_is_the_last_whole_step_and_the_newest_committed_checkpoint(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    folder = run_folder(tmp_path / "run", list(range(1, 31)), [10, 20])
    (folder / "checkpoints/step-00000030.partial").mkdir()
    (folder / "checkpoints/step-00000040").mkdir()  # no manifest: not a checkpoint
    progress = read_progress(folder)
    assert progress is not None
    assert (progress.step, progress.saved_step) == (30, 20)
    assert progress.saved_unix_s == (folder / "checkpoints/step-00000020/manifest.json").stat().st_mtime
    run_folder(folder, list(range(21, 26)), [], attempt=2)
    assert read_progress(folder).step == 25  # type: ignore[union-attr]
    with (folder / "events/0002-rank-0.jsonl").open("a") as file:
        file.write("x" * 3 * TAIL_BYTES + "\n")
    assert read_progress(folder).step == 30  # type: ignore[union-attr]


def snapshot_with(saves: bool) -> ClusterSnapshot:
    """Two jobs that have run for an hour; the second has saved one minute ago."""
    snapshot = ClusterSnapshot()
    pool = snapshot.nodes.add_pool("fake", 4, ["n1", "n2"])
    snapshot.tenants.add_tenant("red")
    for row in snapshot.submit([Job(name, "red", 4, preemptible=True, save_every_s=1e6) for name in "ab"]):
        free = snapshot.nodes.free_gpus(pool)
        placement = free.find(4)
        assert placement is not None
        snapshot.start(row, 0, placement)
    snapshot.advance(3600.0)
    if saves:
        snapshot.note_save(snapshot.jobs.rows["b"], 60.0)
        snapshot.note_save(snapshot.jobs.rows["a"], None)
    return snapshot


def test_reported_save_is_what_preemption_would_lose() -> None:
    rows = np.array([0, 1])
    assert snapshot_with(False).lost_gpu_s(rows, 3600.0).tolist() == [4 * 3720.0] * 2
    snapshot = snapshot_with(True)
    for state in (snapshot, ClusterSnapshot.from_json(snapshot.to_json())):
        assert state.lost_gpu_s(rows, 3600.0).tolist() == [4 * 3720.0, 4 * 180.0]
        assert state.lost_gpu_s(rows, 3700.0).tolist() == [4 * 3820.0, 4 * 280.0]
    snapshot.stop([1])
    assert snapshot.jobs.done_s[1] == 3540.0
    placement = snapshot.nodes.free_gpus(snapshot.nodes.pools[0]).find(4)
    assert placement is not None
    snapshot.advance(4000.0)
    snapshot.start(1, 0, placement)
    snapshot.advance(5000.0)
    assert snapshot.saved_s(rows[1:], 5000.0).tolist() == [3540.0]  # nothing was saved since


def test_save_is_recorded_once_and_shown(api: Api) -> None:
    api.submit(gpus=1, site={"preemptible": "yes"})
    (start,) = api.sync()
    api.sync(StartReport(start.key, "running"))
    for progress in (
        RunProgress(3),
        RunProgress(4),
        RunProgress(12, 10, api.plane.wall_s - 5),
        RunProgress(13, 10, 1.0),
    ):
        api.sync(StartReport(start.key, "running", None, progress))
    lines = [line for line in api.plane.lines if "saves" in line]
    assert [line["age_s"] is None for line in lines] == [True, False]
    assert 5 <= lines[1]["age_s"] < 60
    assert api.get("/api/v1/jobs/1")[0]["progress"]["step"] == 13
    run_cycle(api.plane, api.decider)
