"""Runs of the service that are stopped, preempted or moved, or whose service is killed, match uninterrupted ones."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from engine_runs import ONE_CORE, EngineRun, demo, headway, train_uninterrupted

from conftest import Lived
from eventually import eventually
from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.engines.submissions import Submission, note_submission
from headway.cluster.service.connection import connect, job_path
from headway.cluster.service.service_engine import ServiceEngine
from headway.cluster.submit.runs import provisional_run, request_for
from headway.hardware import parse_on
from headway.recipe import Recipe, to_toml
from headway.track import RunFolder
from service_process import ServiceProcess


@contextmanager
def started(folder: Path, monkeypatch: pytest.MonkeyPatch, settings: str, *options: str) -> Iterator[ServiceProcess]:
    """A service with settings of engines.toml, whose jobs run on one core, and so with one thread per worker."""
    file = folder / "engines.toml"
    file.write_text(f"[service]\nsetup = ['{ONE_CORE}']\n{settings}\n")
    monkeypatch.setenv("HEADWAY_ENGINES", str(file))
    service = ServiceProcess(folder / "runs", *options)
    service.start()
    try:
        yield service
    finally:
        service.stop()


def check_same_bits(run: EngineRun, recipe: Recipe, folder: Path) -> None:
    """A run has ended with the chain and the digest of one that nothing stopped."""
    result, uninterrupted = Lived(run.folder, None), train_uninterrupted(recipe, folder / "uninterrupted")
    assert (result.chain, result.digest) == (uninterrupted.chain, uninterrupted.digest), run.diagnosis()


@pytest.mark.slow
def test_stopped_run_of_the_service_matches_an_uninterrupted_run(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, monkeypatch, "grace_s = 30", "--cpus", "2", "--gpus", "0") as service:
        short = demo(dataset, parallel__shard=2)
        run = EngineRun.submitted(short, tmp_path / "runs", "service", on="cpux2")
        run.reaches(20, starts=1)
        assert headway("requeue", run.name, "--runs", str(run.root))
        run.reaches(60, starts=2)
        service.kill()
        service.start()
        status = run.ended()
        assert (status.state, status.starts) == ("finished", 2), run.diagnosis()
        assert "stopped on request, state saved" in run.line_with("stopped")
        check_same_bits(run, short, tmp_path)
        assert "all steps done" in headway("logs", run.name, "--runs", str(run.root))
        assert not run.processes()


@pytest.mark.slow
def test_run_moved_twice_between_nodes_matches_an_uninterrupted_run(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, monkeypatch, "grace_s = 60", "--emulate", "2x1", "--cpus", "2") as service:
        short = demo(dataset, parallel__shard=2)
        run = EngineRun.submitted(short, tmp_path / "runs", "service", on="cpux2")
        connection, nodes = connect(service.runs), list[str]()

        def place() -> str:
            (row,) = connection.get(job_path(run.name))
            (placed,) = row["placement"]
            return str(placed["node"])

        for starts, step in ((1, 20), (2, 60)):
            run.reaches(step, starts=starts)
            nodes.append(place())
            connection.post(f"/api/v1/nodes/{nodes[-1]}/drain")
            for other in {"node-1", "node-2"} - {nodes[-1]}:
                connection.post(f"/api/v1/nodes/{other}/uncordon")
        status = run.ended()
        nodes.append(place())
        assert (status.state, status.starts) == ("finished", 3), run.diagnosis()
        assert nodes[0] == nodes[2] != nodes[1]
        check_same_bits(run, short, tmp_path)


def submitted_on_fake_gpus(recipe: Recipe, root: Path, gpus: int) -> EngineRun:
    """A run on CPU cores that also holds emulated GPUs: jobs without any neither preempt nor yield."""
    cluster, engine = parse_on("cpux2"), ServiceEngine(root)
    with provisional_run(recipe, root, cluster, "demo") as attempt:
        request = replace(request_for(attempt, cluster, "service", site={"preemptible": "yes"}), gpus=gpus)
        note_submission(attempt.run, Submission("service", engine.launch(request), cluster.name, request))
    return EngineRun(root, request.name)


@pytest.mark.slow
def test_run_preempted_twice_by_higher_priority_matches_an_undisturbed_run(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # two minutes before a job may be preempted, on a clock that runs 600 times as fast
    with started(tmp_path, monkeypatch, "grace_s = 60", "--emulate", "1x2", "--cpus", "4", "--speed", "600") as service:
        engine = ServiceEngine(service.runs)
        short = demo(dataset, parallel__shard=2)
        run = submitted_on_fake_gpus(short, service.runs, gpus=2)
        for number, step in ((1, 20), (2, 60)):
            run.reaches(step, starts=number)
            folder = tmp_path / f"urgent-{number}"
            folder.mkdir()
            wait = ("bash", "-c", "until [ -e end ]; do sleep 0.05; done")
            urgent = engine.launch(LaunchRequest(f"urgent-{number}", wait, folder, gpus=2, site={"priority": "10"}))
            eventually(lambda job=urgent: engine.status([job])[job].state == "running", run.diagnosis)
            assert run.status.state == "waiting", run.diagnosis()
            assert not run.processes()
            (folder / "end").touch()
        status = run.ended()
        assert (status.state, status.starts) == ("finished", 3), run.diagnosis()
        stops = [event for event in connect(service.runs).get("/api/v1/events")["events"] if event["kind"] == "stop"]
        assert [stop["name"] for stop in stops] == [run.name, run.name]
        check_same_bits(run, short, tmp_path)


@pytest.mark.slow
def test_sweep_is_one_array_of_the_service_and_its_runs_match_those_alone(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, runs = demo(dataset, train__steps=40), tmp_path / "runs"
    (tmp_path / "r.toml").write_text(to_toml(short))
    with started(tmp_path, monkeypatch, "", "--gpus", "0", "--cpus", "2") as service:
        where = ("--runs", str(runs))
        words = ("sweep", str(tmp_path / "r.toml"), "--grid", "seed=1,2,3", "--name", "s")
        words += ("--engine", "service", "--on", "cpux1", *where)
        array = json.loads(headway(*words, "--at-once", "1", "--detach", "--json"))["job"]
        rows = connect(runs).get(job_path(array))
        assert [row["id"] for row in rows] == [f"{array}_{index}" for index in range(3)]
        assert sum(row["state"] in ("starting", "running") for row in rows) <= 1
        headway("cancel", "s-seed_3", *where)
        engine = ServiceEngine(runs)
        ends = ["finished", "finished", "cancelled"]
        eventually(lambda: [engine.status([row["id"]])[row["id"]].state for row in rows] == ends, service.log.read_text)
        headway("requeue", "s", *where)
        table = json.loads(headway(*words, "--at-once", "1", "--json"))
        assert {point["run"]: point["state"] for point in table["points"]} == {
            f"s-seed_{seed}": "finished" for seed in (1, 2, 3)
        }
        for seed in (1, 3):
            alone = train_uninterrupted(
                demo(dataset, train__steps=40, seed=seed), tmp_path / f"alone-{seed}", workers=1
            )
            swept = Lived(RunFolder(runs / f"s-seed_{seed}"), None)
            assert (swept.chain, swept.digest) == (alone.chain, alone.digest)
