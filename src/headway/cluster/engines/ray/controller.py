"""The actor that runs a user's jobs on a Ray cluster: detached, on the head node, one for all jobs.

    launch, cancel, signal, status, logs     called by the engine
    arrive  (by a task, in its bundle)       waits until all tasks are there: all commands start, or none
    wish    (by a task, while it runs)       waits for messages to the command

Each job has a placement group, and in each bundle a task that runs the command. Job records are stored as JSON in the
cluster's key-value store: a controller that replaces a dead one restarts the jobs that waited or ran. Secrets are only
in the memory of the controller and of the tasks. Ray is given nothing but dicts, lists, strings and numbers; it imports
this code from the headway that is installed on the node. Remote methods keep their names: actors outlive upgrades.
"""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

from headway.cluster.engines.engine import CANCELLED, OVER
from headway.cluster.engines.ray.array_throttle import ArrayThrottle
from headway.cluster.engines.ray.job import WAITING_FOR_RESOURCES, RayJob, task_order
from headway.cluster.engines.ray.job_registry import RayJobRegistry
from headway.cluster.engines.ray.kv_store import RayKvStore
from headway.cluster.engines.ray.placement_groups import PlacementGroups
from headway.cluster.engines.ray.rules import (
    NextState,
    TaskExit,
    bundle,
    lost_machine,
    must_stop,
    restart_delay_s,
    task_exit,
)
from headway.cluster.engines.ray.task import run_command
from headway.cluster.engines.scripts import log_folder
from headway.cluster.engines.submissions import request_from_json

SETTLE_S = 2.0
"""How long after a controller's death its commands have certainly been killed."""
_CALLED_OFF = TaskExit(0, lost="called off")


class RayJobController:
    """Runs the jobs of one user. All methods run on one event loop, so state changes only between awaits."""

    def __init__(self, user: str) -> None:
        import ray

        self._ray = ray
        self._registry = RayJobRegistry(RayKvStore(user))
        self._groups = PlacementGroups(ray, f"headway/{user}/", self._registry.live)
        self._throttle = ArrayThrottle()
        self._task = ray.remote(max_retries=0, max_calls=0)(run_command)
        self._background: set[asyncio.Task[None]] = set()
        self._actor = ray.get_runtime_context().current_actor
        self._revived = False
        threading.Thread(target=self._call_revive, daemon=True).start()

    def _call_revive(self) -> None:
        """Call ourselves, so that the jobs of an earlier controller resume even if no client calls.

        The event loop does not run yet, and Ray refuses calls until it considers the actor started.
        """
        while not self._revived:
            try:
                self._ray.get(self._actor.revive.remote())
            except self._ray.exceptions.RayError:
                time.sleep(0.2)

    # -- called by the engine

    async def launch(self, job: str, fields: dict[str, Any], secrets: dict[str, str]) -> list[str]:
        """Add a job, or the tasks of an array, and return their ids."""
        await self.revive()
        if self._registry.is_known(job):
            return [job]  # a repeated call, whose first answer was lost
        request = request_from_json(fields)
        names = {job: None} if request.array is None else {f"{job}_{index}": index for index in range(request.array)}
        if request.array is not None:
            self._registry.add_array(job, request.array)
        for name, index in names.items():
            self._begin(RayJob(name, request, index, fields, dict(secrets)))
        return list(names)

    async def status(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """The states of jobs, without the unknown ones."""
        await self.revive()
        return {name: status for name in names if (status := self._registry.status(name)) is not None}

    async def cancel(self, name: str) -> None:
        """End a job; with grace if it runs."""
        await self.revive()
        for job in self._registry.find_live(name):
            if job.cancelled:
                continue
            job.cancelled = True
            if job.started_at is None:
                self._call_off(job)
            else:
                self._registry.change(job, "ending", CANCELLED)
                job.stop()

    async def signal(self, name: str, number: int) -> int:
        """Send a signal to the commands of a job, and return how many jobs received it."""
        await self.revive()
        running = [job for job in self._registry.find_live(name) if job.started_at is not None]
        for job in running:
            job.send(f"signal {number}")
        return len(running)

    async def logs(self, name: str) -> list[str]:
        """The log folders of a job."""
        await self.revive()
        records = self._registry.records(name)
        return [str(log_folder(Path(record["request"]["folder"]), record["id"])) for record in records]

    async def revive(self) -> None:
        """Restart the jobs of an earlier controller, when first called."""
        if self._revived:
            return
        self._revived = True
        self._groups.remove_stale()
        for job, state in self._registry.load():
            if job.request.secrets:
                lost = ", ".join(job.request.secrets)
                reason = f"the controller died, and the values of {lost} with it: submit the job again"
                self._registry.change(job, "failed", reason)
            else:
                self._begin(job, delay_s=0.0 if state == "waiting" else SETTLE_S)

    # -- called by tasks

    async def arrive(self, name: str, number: int, rank: int, node: str) -> dict[str, Any] | None:
        """A task is in its bundle: return what to run once all tasks are, None if the start is called off."""
        job = self._registry.live.get(name)
        if job is None or job.start_number != number:
            return None
        job.arrived[rank] = self._groups.node_name(node)
        if len(job.arrived) == job.request.machines and not job.called_off:
            job.mark_started()
            self._registry.change(job, "running", "")
            self._groups.granted(job)
        job.notify()
        while job.start_number == number and job.started_at is None and not job.called_off:
            await job.changed.wait()
        return None if job.called_off or job.start_number != number else task_order(job, rank)

    async def wish(self, name: str, number: int, seen: int) -> list[str]:
        """The messages to the command of a task after the first `seen`; empty when the start is over."""
        job = self._registry.live.get(name)
        while job is not None and job.is_running(number) and len(job.messages) <= seen:
            await job.changed.wait()
        return job.messages[seen:] if job is not None and job.start_number == number else []

    # -- running a job

    def _begin(self, job: RayJob, delay_s: float = 0.0) -> None:
        self._registry.change(job, "waiting", WAITING_FOR_RESOURCES)
        task = asyncio.get_running_loop().create_task(self._run_job(job, delay_s))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _run_job(self, job: RayJob, delay_s: float) -> None:
        """Start a job until it is over."""
        await job.pause(delay_s)
        following = NextState("cancelled", CANCELLED)
        while not job.cancelled:
            try:
                async with self._throttle.slot(job):
                    exits = [_CALLED_OFF] if job.cancelled else await self._start_once(job)
            except Exception as error:  # whatever Ray raises fails this job only
                exits = [TaskExit(0, error=f"Ray error: {error}")]
            following = job.finish_start(exits)
            if following.state in OVER:
                break
            self._registry.change(job, "waiting", following.reason)
            if set(self._groups.avoided(job)) & set(job.machines):
                self._groups.release(job)  # the next start must avoid one of its machines
            await job.pause(restart_delay_s(job.short_starts))
            following = NextState("cancelled", CANCELLED)
        job.secrets.clear()
        self._registry.change(job, following.state, following.reason)
        self._groups.release(job)

    async def _start_once(self, job: RayJob) -> list[TaskExit]:
        """Run a task in each bundle, and return how they ended, in that order."""
        job.begin_start()
        await self._groups.acquire(job)
        if job.called_off:
            return [_CALLED_OFF]
        job.tasks = {rank: self._submit_task(job, rank) for rank in range(job.request.machines)}
        pending = {asyncio.ensure_future(self._wait_for_task(rank, task)) for rank, task in job.tasks.items()}
        exits: list[TaskExit] = []
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            exits += [task.result() for task in done]
            running = job.started_at is not None
            if pending and must_stop(exits, job.request.spares if running else 0):
                job.stop() if running else self._call_off(job)
            elif pending and (lost := lost_machine(exits, job.machines)):
                self._registry.change(job, job.state, lost)
        return exits

    def _submit_task(self, job: RayJob, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = bundle(job.request)
        task = self._task.options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            memory=resources.get("memory"),
            name=f"headway-{job.id}",
            scheduling_strategy=PlacementGroupSchedulingStrategy(job.group, rank),
        )
        return task.remote(self._actor, job.id, job.start_number, rank)

    async def _wait_for_task(self, rank: int, task: Any) -> TaskExit:
        try:
            return task_exit(rank, await task)
        except self._ray.exceptions.RayTaskError as error:
            return TaskExit(rank, error=f"Ray could not run the task: {str(error).strip().splitlines()[-1]}")
        except self._ray.exceptions.RayError as error:
            return TaskExit(rank, lost=type(error).__name__)

    def _call_off(self, job: RayJob) -> None:
        """Abandon a start before its commands run."""
        job.called_off = True
        if job.turn is not None and not job.turn.done():
            job.turn.set_result(None)
        for rank, task in job.tasks.items():
            if rank not in job.arrived:
                self._ray.cancel(task)
        job.notify()
