"""What users ask of jobs: batches, dependencies, priorities, events."""

import json
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

import test_service_api
from test_service_api import Api, job

from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.messages import StartReport
from headway.cluster.service.outcome import RankResult

api, database = test_service_api.api, test_service_api.database


def ended(api: Api, key: str, status: int) -> None:
    api.sync(StartReport(key, "running"))
    api.sync(StartReport(key, "exited", RankResult(status)))


def state(api: Api, name: str) -> tuple[str, str]:
    (row,) = api.get(f"/api/v1/jobs/{name}")
    return row["state"], row["reason"]


def test_batch_is_queued_as_a_whole_or_not_at_all(api: Api) -> None:
    good, bad = {"request": job()}, {"request": job(gpus=9)}
    assert api.post("/api/v1/jobs:batch", {"jobs": [good, bad]}).status_code == 400
    assert api.get("/api/v1/jobs") == []
    assert api.post("/api/v1/jobs:batch", {"jobs": [good] * 3}).json() == {"ids": ["1", "2", "3"]}
    assert api.post("/api/v1/jobs:batch", {"jobs": [good] * 101}).status_code == 422
    assert api.post("/api/v1/jobs:batch", {"jobs": [good | {"dry": True}]}).status_code == 400
    keyed = {"jobs": [good | {"key": "a"}, good | {"key": "b"}, good | {"key": "a"}]}
    assert api.post("/api/v1/jobs:batch", keyed).json() == {"ids": ["4", "5", "4"]}
    assert api.post("/api/v1/jobs:batch", keyed).json() == {"ids": ["4", "5", "4"]}
    assert len(api.get("/api/v1/jobs")) == 5


@pytest.mark.parametrize(
    ("status", "condition", "expected"),
    [
        (0, "", "starting"),
        (0, ":any", "starting"),
        (3, ":any", "starting"),
        (3, ":ok", "cancelled"),
        (3, "", "cancelled"),
    ],
)
def test_job_waits_for_the_one_that_it_names(api: Api, status: int, condition: str, expected: str) -> None:
    api.submit()
    api.submit(site={"after": f"1{condition}"})
    (first,) = api.sync()
    assert state(api, "2") == ("waiting", "waits for job 1")
    assert api.get("/api/v1/jobs/2/why")["why"] is None
    ended(api, first.key, status)
    run_cycle(api.plane, api.decider)
    assert state(api, "2")[0] == expected
    if expected == "cancelled":
        assert state(api, "2")[1] == "job 1, which had to succeed first, is failed"


def test_cancelled_dependency_cancels_the_whole_chain(api: Api) -> None:
    api.submit()
    for number in (1, 2):
        api.submit(site={"after": str(number)})
    api.post("/api/v1/jobs/1/cancel")
    for _ in range(2):
        run_cycle(api.plane, api.decider)
    assert [state(api, name)[0] for name in "123"] == ["cancelled"] * 3


def test_job_waits_for_all_tasks_of_an_array_by_name(api: Api) -> None:
    api.submit(array=2)
    api.submit(site={"after": "job"})  # the newest of that name: the array
    first, second = api.sync() + api.sync(node="n2")
    assert state(api, "3") == ("waiting", "waits for job 1")
    ended(api, first.key, 0)
    run_cycle(api.plane, api.decider)
    assert state(api, "3")[0] == "waiting"
    ended(api, second.key, 0)
    run_cycle(api.plane, api.decider)
    assert state(api, "3")[0] == "starting"


@pytest.mark.parametrize(
    ("after", "words"),
    [("9", "no job '9'"), ("1:never", "JOB:any"), (":ok", "JOB:any"), (",".join(["1"] * 101), "at most 100")],
)
def test_dependency_that_makes_no_sense_is_refused(api: Api, after: str, words: str) -> None:
    api.submit()
    answer = api.post("/api/v1/jobs", {"request": job(site={"after": after})})
    assert answer.status_code == 400
    assert words in answer.text
    assert len(api.get("/api/v1/jobs")) == 1


def test_priority_of_a_waiting_job_changes_what_starts_next(api: Api) -> None:
    api.submit(machines=2, gpus=2)
    blocker = [*api.sync(), *api.sync(node="n2")]
    for _ in range(2):
        api.submit(machines=2, gpus=2)
    run_cycle(api.plane, api.decider)
    assert api.post("/api/v1/jobs/3/priority", {"priority": 5}).json()["changed"]
    assert not api.post("/api/v1/jobs/3/priority", {"priority": 5}).json()["changed"]
    for number, start in enumerate(blocker, 1):
        api.sync(StartReport(start.key, "exited", RankResult(0)), node=f"n{number}")
    run_cycle(api.plane, api.decider)
    assert [state(api, name)[0] for name in "23"] == ["waiting", "starting"]
    for body in ({"priority": 10**7}, {"priority": 1.5}, {"priority": "high"}, {}):
        assert api.post("/api/v1/jobs/3/priority", body).status_code == 422


@pytest.mark.parametrize("priority", ["nan", "1e9", "1.5", "99999999"])
def test_priority_that_is_no_number_is_refused_at_submit(api: Api, priority: str) -> None:
    assert api.post("/api/v1/jobs", {"request": job(site={"priority": priority})}).status_code == 400


def test_events_tell_a_job_from_queue_to_end(api: Api) -> None:
    api.submit(gpus=1)
    (start,) = api.sync()
    api.post("/api/v1/jobs/1/priority", {"priority": 2})
    ended(api, start.key, 0)
    answer = api.get("/api/v1/events")
    told = [event["sentence"] for event in answer["events"] if event["job"] == "1"]
    assert told == [
        "queued by tenant default: 1 GPU, priority 0",
        "starts on n1 GPUs 0: 1 GPU is free, and no higher-ranked job waits for them",
        "has priority 2 now",
        "runs",
        "over: finished",
    ]
    assert {event["name"] for event in answer["events"] if event["job"]} == {"job"}
    assert answer["events"][0]["sentence"] == "the cluster has 2 nodes with 4 GPUs, 1 tenant, policy headway"
    assert answer["after"] == len(api.plane.lines)
    assert api.get(f"/api/v1/events?after={answer['after']}")["events"] == []
    pages, after = list[Any](), 0
    while (page := api.get(f"/api/v1/events?after={after}&limit=1"))["after"] != after:
        pages, after = pages + page["events"], page["after"]
    assert json.dumps(pages) == json.dumps(answer["events"])


def test_elastic_job_takes_idle_gpus_and_gives_them_back_by_a_restart(api: Api) -> None:
    api.submit(gpus=1, site={"preemptible": "yes", "sizes": "1:1,2:1.9"})
    (start,) = api.sync()
    assert start.gpus == ("0", "1")  # the larger size at once: nobody else waits
    api.sync(StartReport(start.key, "running"))
    (other,) = api.sync(StartReport(start.key, "running"), node="n2") or [None]
    assert other is None
    now = api.plane.now_s
    api.plane._offset += 300  # past its minimum run time
    assert api.plane.now_s > now
    for _ in range(3):
        api.submit(gpus=1)
    run_cycle(api.plane, api.decider)
    (decided,) = [line["decided"] for line in api.plane.lines if "resize" in json.dumps(line.get("decided", ""))]
    assert [decision["job"] for decision in decided if decision["kind"] == "resize"] == ["1"]
    assert state(api, "1")[0] == "ending"
    api.sync(StartReport(start.key, "exited", RankResult(75)))
    run_cycle(api.plane, api.decider)
    (row,) = api.get("/api/v1/jobs/1")
    assert (row["state"], row["starts"]) == ("starting", 2)
    assert sum(len(place["gpus"]) for place in row["placement"]) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 1, "site": {"sizes": "1:1,2:1.9"}}, "must be preemptible"),
        ({"gpus": 1, "machines": 2, "site": {"sizes": "1:1,2:1.9", "preemptible": "yes"}}, "one machine"),
        ({"gpus": 1, "site": {"sizes": "2:1", "preemptible": "yes"}}, "increasing from the 1 requested"),
        ({"gpus": 1, "site": {"sizes": "1:1,2", "preemptible": "yes"}}, "relative speeds"),
        ({"gpus": 1, "site": {"sizes": "1:1,2:nan", "preemptible": "yes"}}, "speeds"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(api: Api, options: dict[str, Any], words: str) -> None:
    answer = api.post("/api/v1/jobs", {"request": job(**options)})
    assert answer.status_code == 400, answer.text
    assert words in answer.text
