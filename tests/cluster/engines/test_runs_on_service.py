"""A run of the service that is stopped, and whose service is killed meanwhile, matches an uninterrupted one."""

from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from engine_runs import EngineRun, demo, headway, train_uninterrupted

from conftest import Lived
from headway.cluster.service.connection import connect, job_path
from service_process import ServiceProcess


@pytest.mark.slow
def test_stopped_run_of_the_service_matches_an_uninterrupted_run(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engines.toml"
    file.write_text('[service]\ngrace_s = 30\nsetup = ["taskset -pc 0 $$ >/dev/null"]\n')  # one thread per worker
    monkeypatch.setenv("HEADWAY_ENGINES", str(file))
    service = ServiceProcess(tmp_path / "runs", "--cpus", "2", "--gpus", "0")
    service.start()
    try:
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
        result, uninterrupted = Lived(run.folder, None), train_uninterrupted(short, tmp_path / "uninterrupted")
        assert (result.chain, result.digest) == (uninterrupted.chain, uninterrupted.digest), run.diagnosis()
        assert "all steps done" in headway("logs", run.name, "--runs", str(run.root))
        assert not run.processes()
    finally:
        service.stop()


@pytest.mark.slow
def test_run_moved_twice_between_nodes_matches_an_uninterrupted_run(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engines.toml"
    file.write_text('[service]\ngrace_s = 60\nsetup = ["taskset -pc 0 $$ >/dev/null"]\n')  # one thread per worker
    monkeypatch.setenv("HEADWAY_ENGINES", str(file))
    service = ServiceProcess(tmp_path / "runs", "--emulate", "2x1", "--cpus", "2")
    service.start()
    try:
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
        result, uninterrupted = Lived(run.folder, None), train_uninterrupted(short, tmp_path / "uninterrupted")
        assert (result.chain, result.digest) == (uninterrupted.chain, uninterrupted.digest), run.diagnosis()
    finally:
        service.stop()
