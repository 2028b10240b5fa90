"""The parts of the Ray controller that need no Ray: the job registry, hand-over of placement groups, throttling."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headway.cluster.engines import LaunchRequest
from headway.cluster.engines.ray import job_registry
from headway.cluster.engines.ray.array_throttle import ArrayThrottle
from headway.cluster.engines.ray.job import RayJob, task_order
from headway.cluster.engines.ray.job_registry import RayJobRegistry
from headway.cluster.engines.ray.placement_groups import PlacementGroups, heir
from headway.cluster.engines.submissions import request_to_json


class MemoryStore:
    """A RayKvStore without Ray."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], dict[str, Any]] = {}

    def put(self, kind: str, name: str, record: dict[str, Any]) -> None:
        self.records[kind, name] = record

    def remove(self, kind: str, name: str) -> None:
        del self.records[kind, name]

    def read_all(self, kind: str) -> dict[str, dict[str, Any]]:
        return {name: record for (of_kind, name), record in self.records.items() if of_kind == kind}


def make_job(name: str, order: float = 0.0, **fields: Any) -> RayJob:
    request = LaunchRequest("job", ("true",), Path("/folder"), **fields)
    return RayJob(name, request, fields=request_to_json(request), order=order)


def registry_of(store: MemoryStore) -> RayJobRegistry:
    return RayJobRegistry(store)  # type: ignore[arg-type]


def test_next_controller_loads_unfinished_jobs_in_order() -> None:
    store = MemoryStore()
    before = registry_of(store)
    before.add_array("a", 2)
    for name, order, state in [("a_1", 3.0, "running"), ("a_0", 2.0, "finished"), ("b", 1.0, "waiting")]:
        job = make_job(name, order)
        job.starts = 4
        before.change(job, state, "")  # type: ignore[arg-type]
    after = registry_of(store)
    assert [(job.id, job.starts, state) for job, state in after.load()] == [("b", 4, "waiting"), ("a_1", 4, "running")]
    assert after.is_known("a")
    assert [record["id"] for record in after.records("a")] == ["a_0"]


def test_status_of_an_array_combines_its_tasks() -> None:
    registry = registry_of(MemoryStore())
    registry.add_array("a", 2)
    registry.change(make_job("a_0"), "finished", "")
    registry.change(make_job("a_1"), "running", "")
    status = registry.status("a")
    assert status is not None
    assert (status["state"], status["reason"]) == ("running", "2 tasks: 1 running, 1 finished")
    assert [job.id for job in registry.find_live("a")] == ["a_1"]
    assert registry.status("unknown") is None


def test_only_the_newest_finished_jobs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_registry, "HISTORY", 2)
    store = MemoryStore()
    registry = registry_of(store)
    for name in "abc":
        registry.change(make_job(name), "finished", "")
    assert [registry.is_known(name) for name in "abc"] == [False, True, True]
    assert sorted(store.read_all("job")) == ["b", "c"]


def test_placement_group_goes_to_the_first_job_of_the_same_shape() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        done, large, small = make_job("done", gpus=1), make_job("large", gpus=2), make_job("small", gpus=1)
        done.state = "running"
        large.turn, small.turn = loop.create_future(), loop.create_future()
        assert heir(done, [done, small, large]) is small.turn
        assert heir(done, [done, large, small]) is None, "it must not overtake a job of another shape"
        small.turn.set_result(None)
        assert heir(done, [done, small]) is None

    asyncio.run(run())


def test_granted_group_lets_the_next_job_ask() -> None:
    async def run() -> None:
        first, second, third = (make_job(name) for name in ("first", "second", "third"))
        second.turn, third.turn = (asyncio.get_running_loop().create_future() for _ in range(2))
        groups = PlacementGroups(None, "headway/", {job.id: job for job in (first, second, third)})
        groups.granted(first)
        assert not second.turn.done(), "it held no pending group"
        first.group_pending = True
        groups.granted(first)
        assert (first.group_pending, second.turn.done(), third.turn.done()) == (False, True, False)

    asyncio.run(run())


def test_array_tasks_take_turns_and_skip_cancelled_ones() -> None:
    async def run() -> None:
        throttle, order = ArrayThrottle(), list[str]()
        jobs = [make_job(f"a_{index}", array=4, at_once=1) for index in range(4)]

        async def start(job: RayJob) -> None:
            async with throttle.slot(job):
                order.append(job.id)
                await asyncio.sleep(0.01)

        tasks = [asyncio.ensure_future(start(job)) for job in jobs]
        await asyncio.sleep(0)
        jobs[1].cancelled = True
        jobs[1].notify()
        await asyncio.gather(*tasks)
        assert order == ["a_0", "a_1", "a_2", "a_3"]
        assert jobs[1].cancelled

    asyncio.run(run())


def test_stop_signals_once_and_kills_after_the_grace_period() -> None:
    async def run() -> None:
        job = make_job("a", grace_s=0.02)
        job.begin_start()
        job.arrived = {0: "m0"}
        job.mark_started()
        job.stop()
        job.stop()
        await asyncio.sleep(0.1)
        assert job.messages == ["signal 10", "kill"]
        assert job.signalled_after_s is not None
        job.begin_start()
        assert (job.messages, job.signalled_after_s, job.is_running(1)) == ([], None, False)

    asyncio.run(run())


def test_order_of_a_task_names_its_machine_and_log() -> None:
    job = make_job("a_3", setup=("module load x",))
    job.index, job.starts, job.machines, job.secrets = 3, 2, ["m0", "m1"], {"TOKEN": "x"}
    order = task_order(job, 1)
    assert order["words"][:2] == ["bash", "-c"]
    assert order["log"] == "/folder/jobs/a/3/0002-1.log"
    expected = {"HEADWAY_MACHINE": "1", "HEADWAY_MACHINES": "m0,m1", "HEADWAY_ARRAY_INDEX": "3", "TOKEN": "x"}
    assert expected.items() <= order["environment"].items()
