"""The actor that owns a user's jobs on a Ray cluster: detached, on the head node, one for all jobs.

    launch                             one placement group a job, and in each bundle a task that runs the command
    arrive  (a task, in its bundle)    waits until all have come: all commands start, or none
    wish    (a task, while it runs)    waits for a signal to pass on
    cancel, signal, status             for whoever asks

What it must not forget lies in the cluster's own key-value store, as JSON: an owner that follows one that died starts
the jobs again that waited or ran. Secrets are in its memory only, and go from there into the memory of the tasks. Ray
is given nothing but dicts, lists, strings and numbers, and finds this code where headway is installed.
"""

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.cluster.engines.engine import OVER, JobStatus, State, array_status
from headway.cluster.engines.ray.array_throttle import ArrayThrottle
from headway.cluster.engines.ray.job import WAITS, WARN, RayJob, logs_of, order_of, shape_of
from headway.cluster.engines.ray.kv_store import RayKvStore
from headway.cluster.engines.ray.rules import (
    WELL_S,
    NextState,
    TaskExit,
    bundle,
    lost_one,
    machines_of,
    next_state,
    pause_s,
    strategy_of,
    why_never_fits,
)
from headway.cluster.engines.ray.task import run_command
from headway.cluster.engines.submissions import request_from_json, request_to_json

__all__ = ["RayJobController"]

KEPT = 2000
"""Jobs that are over and still known."""
ASKED = 32
"""Placement groups that Ray is asked for at a time; it tries them all again whenever something becomes free."""
SETTLE_S = 2.0
"""So long after an owner's death, guards have surely ended what ran."""


class RayJobController:
    """Owns the jobs of one user. All methods run on one event loop, and change things only between two awaits."""

    def __init__(self, user: str) -> None:
        import ray

        self._ray, self._store = ray, RayKvStore(user)
        self._jobs: dict[str, RayJob] = {}
        """Those that are not over, the oldest first."""
        self._old: dict[str, dict[str, Any]] = {}
        """What is known of those that are over, the oldest first."""
        self._arrays: dict[str, int] = {}
        self._turns = ArrayThrottle()
        self._prefix = f"headway/{user}/"
        self._task = ray.remote(max_retries=0, max_calls=0)(run_command)
        self._names: dict[str, str] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._me = ray.get_runtime_context().current_actor
        self._revived = False
        threading.Thread(target=self._wake, daemon=True).start()

    def _wake(self) -> None:
        """Call ourselves, so that jobs of an owner before us go on even if nobody asks.

        The loop does not run yet, and Ray refuses calls for as long as it believes that we are still being started.
        """
        while not self._revived:
            try:
                self._ray.get(self._me.revive.remote())
            except self._ray.exceptions.RayError:
                time.sleep(0.2)

    # -- for those who ask

    async def launch(self, job: str, fields: dict[str, Any], secrets: dict[str, str]) -> list[str]:
        """Take a job in, or the copies of an array; their ids."""
        await self.revive()
        if self._record(job) is not None or job in self._arrays:
            return [job]  # asked again by one who did not hear the answer
        request = request_from_json(fields)
        copies = [(job, None)] if request.array is None else [(f"{job}_{one}", one) for one in range(request.array)]
        if request.array is not None:
            self._store.put("array", job, {"copies": request.array})
            self._arrays[job] = request.array
        for name, index in copies:
            self._begin(RayJob(name, request, index, fields, dict(secrets)))
        return [name for name, _ in copies]

    async def status(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """How jobs stand; those that nobody knows are left out."""
        await self.revive()
        found = {name: self._status(name) for name in names}
        return {name: status for name, status in found.items() if status is not None}

    async def cancel(self, name: str) -> None:
        """Have a job end: with grace if it runs."""
        await self.revive()
        for job in self._live(name):
            if job.cancelled:
                continue
            job.cancelled = True
            if job.began is None:
                self._call_off(job)
            else:
                self._change(job, "ending", "somebody cancelled it")
                self._end(job)

    async def signal(self, name: str, number: int) -> int:
        """Have the commands of a job hear a signal; how many jobs there were to hear it."""
        await self.revive()
        running = [job for job in self._live(name) if job.began is not None]
        for job in running:
            job.wish(f"signal {number}")
        return len(running)

    async def logs(self, name: str) -> list[str]:
        """Folders that hold what a job prints."""
        await self.revive()
        records = [self._record(one) for one in self._copies(name)]
        return [str(logs_of(Path(one["request"]["folder"]), one["id"])) for one in records if one]

    # -- for tasks

    async def arrive(self, name: str, number: int, rank: int, node: str) -> dict[str, Any] | None:
        """A task is in its bundle: what to run, once all of them are; None when the start is called off."""
        job = self._jobs.get(name)
        if job is None or job.number != number:
            return None
        job.arrived[rank] = self._name(node)
        if len(job.arrived) == job.request.machines and not job.off:
            self._started(job)
        job.tell()
        while job.number == number and job.began is None and not job.off:
            await job.news.wait()
        return None if job.off or job.number != number else order_of(job, rank)

    def _name(self, node: str) -> str:
        """What people call a node; Ray is asked again only for one that is new."""
        if node not in self._names:
            self._names = {number: machine.name for number, machine in machines_of(self._ray.nodes(), {}).items()}
        return self._names.get(node, node)

    async def wish(self, name: str, number: int, seen: int) -> list[str]:
        """What the command of a task is to hear, beyond what it has; empty when the start is over."""
        job = self._jobs.get(name)
        while job is not None and job.number == number and job.began is not None and len(job.wishes) <= seen:
            await job.news.wait()
        return job.wishes[seen:] if job is not None and job.number == number else []

    # -- the life of a job

    async def revive(self) -> None:
        """Start the jobs again that were an owner's before us; the first time that it is asked for."""
        if self._revived:
            return
        self._revived = True
        self._tidy()
        self._arrays |= {
            key: found["copies"] for key in self._store.names("array") if (found := self._store.get("array", key))
        }
        records = [
            record
            for key in self._store.names("job")
            if (record := self._store.get("job", key)) and key not in self._jobs
        ]
        for record in sorted(records, key=lambda record: record["order"]):
            key = record["id"]
            if record["status"]["state"] in OVER:
                self._old[key] = record
                continue
            job = RayJob(
                key, request_from_json(record["request"]), record["index"], record["request"], order=record["order"]
            )
            job.starts = record["status"]["starts"]
            if job.request.secrets:
                lost = ", ".join(job.request.secrets)
                self._change(job, "failed", f"its owner died, and with it the values of {lost}: submit it again")
            else:
                self._begin(job, after_s=0.0 if record["status"]["state"] == "waiting" else SETTLE_S)

    def _tidy(self) -> None:
        """Give back what an owner before us had reserved."""
        from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

        for number, group in placement_group_table().items():
            if group["name"].startswith(self._prefix) and group["state"] != "REMOVED":
                remove_placement_group(PlacementGroup(self._ray.PlacementGroupID(bytes.fromhex(number))))

    def _begin(self, job: RayJob, after_s: float = 0.0) -> None:
        self._jobs[job.id] = job
        self._change(job, "waiting", WAITS)
        life = asyncio.get_running_loop().create_task(self._whole_life(job, after_s))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    async def _whole_life(self, job: RayJob, after_s: float) -> None:
        """Start a job until it is over."""
        await self._rest(job, after_s)
        while not job.cancelled:
            try:
                async with self._turns.of(job):
                    ends = [TaskExit(0, lost="called off")] if job.cancelled else await self._one_start(job)
            except Exception as error:  # whatever Ray says: the job is told of it, and the others go on
                ends = [TaskExit(0, error=f"Ray says: {error}")]
            following = self._next(job, ends)
            if following.state in OVER:
                self._over(job, following)
                return
            self._change(job, "waiting", following.reason)
            if set(self._without(job)) & set(job.machines):
                self._hand_on(job)  # it does not want these machines any more
            await self._rest(job, pause_s(job.short))
        self._over(job, NextState("cancelled", "somebody cancelled it"))

    def _next(self, job: RayJob, ends: list[TaskExit]) -> NextState:
        lasted = 0.0 if job.began is None else time.monotonic() - job.began
        job.short = 0 if lasted > WELL_S else job.short + 1
        limit = job.request.limit_s if job.limited else None
        following = next_state(
            ends, job.machines, cancelled=job.cancelled, limit_s=limit, told_after_s=job.told_after_s
        )
        job.exit_status, job.began = following.exit_status, None
        job.suspects = tuple(dict.fromkeys(name for end in ends for name in end.suspects))
        job.tell()
        return following

    async def _rest(self, job: RayJob, seconds: float) -> None:
        """Wait, but for nobody who cancels it."""
        until = time.monotonic() + seconds
        while not job.cancelled and (left := until - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(job.news.wait(), left)
            except TimeoutError:
                return

    async def _one_start(self, job: RayJob) -> list[TaskExit]:
        """Have a task in each bundle, and see them all end; how they did, the first first."""
        job.number += 1
        job.arrived, job.wishes, job.began = {}, [], None
        job.off = job.told = job.limited = False
        job.told_after_s = None
        if job.group is None:
            job.group = await self._group_for(job)
        if job.off:
            return [TaskExit(0, lost="called off")]
        job.tasks = {rank: self._send(job, rank) for rank in range(job.request.machines)}
        pending = {asyncio.ensure_future(self._end_of(rank, task)) for rank, task in job.tasks.items()}
        ends: list[TaskExit] = []
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            ends += [one.result() for one in done]
            gone = sum(bool(end.lost) for end in ends)
            if pending and (any(end.error for end in ends) or gone > (0 if job.began is None else job.request.spares)):
                self._call_off(job) if job.began is None else self._end(job)
            elif pending and gone:
                self._change(job, job.state, lost_one(ends, job.machines))
        return ends

    async def _group_for(self, job: RayJob) -> Any:
        """A placement group: one that a job of the same shape has left, or a new one, when it is our turn."""
        if sum(other.asked for other in self._jobs.values()) >= ASKED:
            job.turn = asyncio.get_running_loop().create_future()
            left = await job.turn
            if left is not None or job.off:
                return left
        job.asked = True
        return self._reserve(job)

    def _next_turn(self) -> None:
        """Somebody has got what Ray was asked for, or does not want it any more: another may ask."""
        for job in self._jobs.values():
            if job.turn is not None and not job.turn.done():
                job.turn.set_result(None)
                return

    def _hand_on(self, job: RayJob) -> None:
        """Give back what Ray has reserved; or to the job that has waited longest, if it wants the same."""
        from ray.util.placement_group import remove_placement_group

        group, job.group = job.group, None
        heir = None if job.asked else self._heir(job)
        if heir is not None:
            heir.set_result(group)
        elif group is not None:
            remove_placement_group(group)
        if job.asked:
            job.asked = False
            self._next_turn()

    def _heir(self, job: RayJob) -> "asyncio.Future[Any] | None":
        """The first that waits for the same and has not asked Ray; it may overtake only those who want the same too."""
        shape = shape_of(job.request)
        for one in self._jobs.values():
            if one.state == "waiting" and shape_of(one.request) != shape:
                return None
            if one.turn is not None and not one.turn.done():
                return one.turn
        return None

    def _reserve(self, job: RayJob) -> Any:
        """One bundle a machine, in a placement group of its own."""
        from ray.util.placement_group import placement_group

        avoid = self._without(job)
        everything = machines_of(self._ray.nodes(), {}) if avoid else {}
        avoided = [node for node, machine in everything.items() if machine.name in avoid]
        bundles = [bundle(job.request)] * job.request.machines
        selector = [{"ray.io/node-id": f"!in({','.join(avoided)})"}] * len(bundles) if avoided else None
        return placement_group(
            bundles, strategy=strategy_of(job.request), name=f"{self._prefix}{job.id}", bundle_label_selector=selector
        )

    def _without(self, job: RayJob) -> tuple[str, ...]:
        """Machines that a job is not to have: those that it was submitted without, and those that its command suspects
        of something, as long as there are others."""
        request = job.request
        if not job.suspects:
            return request.avoid
        all_of_them = tuple(dict.fromkeys((*request.avoid, *job.suspects)))
        there = list(machines_of(self._ray.nodes(), {}).values())
        return request.avoid if why_never_fits(replace(request, avoid=all_of_them), there) else all_of_them

    def _send(self, job: RayJob, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted = bundle(job.request)
        task = self._task.options(
            num_cpus=wanted["CPU"],
            num_gpus=wanted.get("GPU", 0),
            memory=wanted.get("memory"),
            name=f"headway-{job.id}",
            scheduling_strategy=PlacementGroupSchedulingStrategy(job.group, rank),
        )
        return task.remote(self._me, job.id, job.number, rank)

    async def _end_of(self, rank: int, task: Any) -> TaskExit:
        try:
            said = await task
        except self._ray.exceptions.RayTaskError as error:
            return TaskExit(rank, error=f"Ray could not run it: {str(error).strip().splitlines()[-1]}")
        except self._ray.exceptions.RayError as error:
            return TaskExit(rank, lost=type(error).__name__)
        more = {"lost": said.get("lost", ""), "error": said.get("error", ""), "said": said.get("said")}
        return TaskExit(rank, exit_status=said.get("exit"), suspects=tuple(said.get("suspects", ())), **more)

    def _started(self, job: RayJob) -> None:
        """All tasks have come: this is a start."""
        job.began = time.monotonic()
        job.starts += 1
        job.machines = [job.arrived[rank] for rank in range(job.request.machines)]
        self._change(job, "running", "")
        if job.asked:
            job.asked = False
            self._next_turn()
        if job.request.limit_s is not None:
            asyncio.get_running_loop().call_later(
                max(0.0, job.request.limit_s - job.request.grace_s), self._time_is_up, job, job.number
            )

    def _time_is_up(self, job: RayJob, number: int) -> None:
        if job.number == number and job.began is not None:
            job.limited = True
            self._end(job, min(job.request.grace_s, job.request.limit_s or 0.0))

    def _end(self, job: RayJob, grace_s: float | None = None) -> None:
        """Have the commands of a start end: SIGUSR1, and after the grace for good."""
        if not job.told:
            job.told = True
            job.wish(WARN)
        seconds = job.request.grace_s if grace_s is None else grace_s
        asyncio.get_running_loop().call_later(seconds, self._kill, job, job.number)

    def _kill(self, job: RayJob, number: int) -> None:
        if job.number == number and job.began is not None and "kill" not in job.wishes:
            job.wish("kill")

    def _call_off(self, job: RayJob) -> None:
        """A start that has started nothing yet does not any more."""
        job.off = True
        if job.turn is not None and not job.turn.done():
            job.turn.set_result(None)
        for rank, task in job.tasks.items():
            if rank not in job.arrived:
                self._ray.cancel(task)
        job.tell()

    def _over(self, job: RayJob, following: NextState) -> None:
        job.secrets.clear()
        self._change(job, following.state, following.reason)
        self._jobs.pop(job.id, None)
        self._hand_on(job)
        if len(self._old) > KEPT:
            oldest = next(iter(self._old))
            del self._old[oldest]
            self._store.remove("job", oldest)

    # -- what is written down

    def _change(self, job: RayJob, state: State, reason: str) -> None:
        job.state, job.reason = state, reason
        record = self._facts(job)
        self._store.put("job", job.id, record)
        if state in OVER:
            self._old[job.id] = record

    def _live(self, name: str) -> list[RayJob]:
        return [self._jobs[one] for one in self._copies(name) if one in self._jobs]

    def _copies(self, name: str) -> list[str]:
        return [f"{name}_{one}" for one in range(self._arrays[name])] if name in self._arrays else [name]

    def _status(self, name: str) -> dict[str, Any] | None:
        copies = self._copies(name)
        records = [self._record(one) for one in copies]
        found = [one["status"] for one in records if one is not None]
        if copies == [name] or not found:
            return found[0] if found else None
        whole = array_status([JobStatus(**{**one, "machines": tuple(one["machines"])}) for one in found])
        return whole.__dict__ | {"machines": list(whole.machines)}

    def _record(self, name: str) -> dict[str, Any] | None:
        return self._facts(self._jobs[name]) if name in self._jobs else self._old.get(name)

    def _facts(self, job: RayJob) -> dict[str, Any]:
        """All that is written down of a job."""
        if not job.fields:
            job.fields = request_to_json(job.request)
        fields = {"format": 1, "id": job.id, "index": job.index, "order": job.order}
        return {**fields, "request": job.fields, "status": job.status()}
