"""Sizes of jobs: which make sense, what a start learns of its own, nodes that a job avoids, and when one may grow."""

from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

import test_service_api
from test_service_api import Api, job

from headway.agent.launch.granted_gpus import granted_gpus
from headway.cli.service_jobs import job_table
from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.messages import StartReport
from headway.cluster.service.outcome import RankResult
from headway.errors import UsageError

api, database = test_service_api.api, test_service_api.database
SPREAD = {"preemptible": "yes", "sizes": "1:1,3:2.2,4:2.5", "spread": "yes"}


def placement(api: Api, name: str) -> dict[str, int]:
    (row,) = api.get(f"/api/v1/jobs/{name}")
    return {place["node"]: len(place["gpus"]) for place in row["placement"]}


def test_start_on_several_nodes_learns_the_gpus_of_each(api: Api) -> None:
    api.submit(gpus=1)
    (blocker,) = api.sync()
    api.submit(gpus=1, site=SPREAD)
    starts = api.sync(StartReport(blocker.key, "running")) + api.sync(node="n2")
    mine = sorted((start for start in starts if start.key.startswith("2:")), key=lambda start: start.rank)
    assert placement(api, "2") == {"n1": 1, "n2": 2}
    assert len(mine) == 2
    for start in mine:
        assert start.gpu_counts == tuple(placement(api, "2")[node] for node in start.machines)
        assert start.gpu_counts[start.rank] == len(start.gpus)
        environment = {
            "HEADWAY_MACHINES": ",".join(start.machines),
            "HEADWAY_GPUS": ",".join(map(str, start.gpu_counts)),
        }
        assert sorted(granted_gpus(environment)) == [1, 2]


def test_job_that_nothing_waits_behind_grows_once_gpus_are_idle(api: Api) -> None:
    api.submit(gpus=2)
    api.submit(gpus=1, site=SPREAD)
    blocker, start = sorted([*api.sync(), *api.sync(node="n2")], key=lambda start: start.key)
    for known in (blocker, start):
        api.sync(StartReport(known.key, "running"), node=known.machines[0])
    assert sum(placement(api, "2").values()) == 1
    api.plane._offset += 1801  # a restart pays off
    run_cycle(api.plane, api.decider)
    assert api.get("/api/v1/jobs/2")[0]["state"] == "running", "its larger sizes do not fit beside the other"
    api.sync(StartReport(blocker.key, "exited", RankResult(0)), node=blocker.machines[0])
    run_cycle(api.plane, api.decider)
    (row,) = api.get("/api/v1/jobs/2")
    assert (row["state"], row["reason"]) == ("ending", "grows from 1 to 4 GPUs, which adds the work of 1.5 GPUs")
    api.sync(StartReport(start.key, "exited", RankResult(75)), node=start.machines[0])
    run_cycle(api.plane, api.decider)
    assert placement(api, "2") == {"n1": 2, "n2": 2}
    assert not api.plane.waits(), "it has its largest size"
    (row,) = api.get("/api/v1/jobs/2")
    assert row["sizes"] == [1, 3, 4]
    assert "4 of 1,3,4" in "\n".join(job_table([row]))
    (event,) = [
        event for event in api.get("/api/v1/events")["events"] if event["kind"] == "job" and event["job"] == "2"
    ]
    assert event["sentence"] == "queued by tenant default: 1, 3 or 4 GPUs, priority 0"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 1, "site": {"preemptible": "yes", "spread": "yes"}}, "spread=yes, but no sizes"),
        ({"gpus": 1, "site": SPREAD | {"spread": "perhaps"}}, "yes or no"),
        ({"gpus": 1, "machines": 2, "site": SPREAD}, "one machine"),
        ({"gpus": 1, "site": SPREAD | {"sizes": "1,3"}}, "relative speeds"),
        ({"gpus": 1, "machines": 2, "spares": 1}, "no spare machines"),
        ({"gpus": 1, "avoid": ("n1", "n2")}, "it avoids every node"),
        ({"gpus": 1, "machines": 2, "avoid": ("n1",)}, "cannot run without n1: job job requests 2 machines"),
    ],
)
def test_requests_that_make_no_sense_are_refused(api: Api, options: dict[str, Any], words: str) -> None:
    answer = api.post("/api/v1/jobs", {"request": job(**options)})
    assert answer.status_code == 400, answer.text
    assert words in answer.text


def test_job_never_gets_a_node_that_it_avoids(api: Api) -> None:
    for name in ("1", "2"):
        api.submit(gpus=2, avoid=("n1", "gone"), site={"preemptible": "yes"})
        run_cycle(api.plane, api.decider)
        assert placement(api, name) == ({"n2": 2} if name == "1" else {})
    why = api.get("/api/v1/jobs/2/why")["why"]
    assert why["sentence"] == "needs 2 GPUs on nodes other than n1, gone, which it must avoid"
    api.submit(gpus=2, site={"preemptible": "yes"})
    run_cycle(api.plane, api.decider)
    assert placement(api, "3") == {"n1": 2}
    assert placement(api, "2") == {}


@pytest.mark.parametrize(
    ("machines", "gpus"), [("a,b", ""), ("a,b", "1"), ("a", "0"), ("a,b", "1,x"), ("a", "1,2"), ("a", "-1")]
)
def test_grant_that_names_no_gpus_per_machine_is_refused(machines: str, gpus: str) -> None:
    with pytest.raises(UsageError, match="--elastic needs the GPUs on each machine"):
        granted_gpus({"HEADWAY_MACHINES": machines, "HEADWAY_GPUS": gpus})
