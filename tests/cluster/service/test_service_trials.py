"""Trying a job or a policy on the live cluster changes nothing, and says what the real thing then does."""

from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

import test_service_api
from test_service_api import Api, job

from headway.cli.live_trial import read_job
from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.messages import StartReport
from headway.errors import UsageError

api, database = test_service_api.api, test_service_api.database


def state_of(api: Api) -> str:
    api.decider._follow(api.plane.lines)
    return api.decider.state.to_json()


def test_tried_job_waits_or_starts_as_the_submitted_one_does(api: Api) -> None:
    for gpus, priority in ((1, 0), (2, 0), (2, 0), (1, 7), (0, 0)):
        asked = job(gpus=gpus, site={"priority": str(priority), "preemptible": "yes"})
        before = state_of(api)
        tried = api.post("/api/v1/simulate", {"request": asked}).json()
        assert state_of(api) == before
        name = api.post("/api/v1/jobs", {"request": asked}).json()["id"]
        report = run_cycle(api.plane, api.decider)
        (row,) = api.get(f"/api/v1/jobs/{name}")
        expected = {"starting": "starts", "waiting": "waits"}[row["state"]]
        assert tried["job"]["state"] == expected, (gpus, priority)
        assert len(tried["stops"]) == report.stopped
        if expected == "waits":
            assert tried["job"]["sentence"] == api.get(f"/api/v1/jobs/{name}/why")["why"]["sentence"]
        for node in ("n1", "n2"):
            starts = api.sync(node=node)
            api.sync(*(StartReport(start.key, "running") for start in starts), node=node)


def test_tried_policy_compares_the_starts_of_waiting_jobs(api: Api) -> None:
    for _ in range(4):
        api.submit(gpus=2, site={"preemptible": "yes"})
    run_cycle(api.plane, api.decider)
    before = state_of(api)
    answer = api.post("/api/v1/simulate", {"policy": "fifo"}).json()
    assert state_of(api) == before
    assert answer["policy"] == "fifo"
    assert [row["job"] for row in answer["waiting"]] == ["3", "4"]
    assert all(row["before"]["p50_s"] is None or row["before"]["p50_s"] >= 0 for row in answer["waiting"])
    for body in ({}, {"policy": "best"}, {"policy": "fifo", "request": job()}, {"request": job(gpus=9)}):
        assert api.post("/api/v1/simulate", body).status_code == 400


@pytest.mark.parametrize("text", ["gpus = true", 'gpus = "4"', "gpu = 4", "gpus = -1", "gpus ="])
def test_job_file_that_is_not_understood_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as refusal:
        read_job(file)
    assert refusal.value.hint
    file.write_text('gpus = 4\nmachines = 2\ntenant = "red"\nmemory_gib = 1.5\npreemptible = true\npriority = 3')
    request = read_job(file)
    assert (request.gpus, request.machines, request.memory_bytes) == (4, 2, 3 * 2**29)
    assert {"tenant": "red", "priority": "3", "preemptible": "yes"}.items() <= request.site.items()
