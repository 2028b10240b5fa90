"""Placement groups of the jobs on a Ray cluster: requested, handed over from job to job, and returned."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from headway.cluster.engines.ray.job import RayJob
from headway.cluster.engines.ray.rules import (
    bundle,
    machines_from_nodes,
    machines_to_avoid,
    placement_strategy,
    resource_shape,
)

MAX_PENDING = 32
"""Placement groups requested from Ray at a time; it retries all of them whenever something becomes free."""


class PlacementGroups:
    """The placement groups of `jobs`, live and oldest first. Used from the controller's event loop only."""

    def __init__(self, ray: Any, prefix: str, jobs: Mapping[str, RayJob]) -> None:
        self._ray, self._prefix, self._jobs = ray, prefix, jobs
        self._node_names: dict[str, str] = {}

    def remove_stale(self) -> None:
        """Return what an earlier controller had reserved."""
        from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

        for number, group in placement_group_table().items():
            if group["name"].startswith(self._prefix) and group["state"] != "REMOVED":
                remove_placement_group(PlacementGroup(self._ray.PlacementGroupID(bytes.fromhex(number))))

    async def acquire(self, job: RayJob) -> None:
        """Give a job a placement group, unless its start is called off meanwhile: one that a job of the same shape
        hands over, or a new one when it is the job's turn."""
        if job.group is None and sum(other.group_pending for other in self._jobs.values()) >= MAX_PENDING:
            job.turn = asyncio.get_running_loop().create_future()
            job.group = await job.turn
            if job.called_off:
                return
        if job.group is None:
            job.group_pending = True
            job.group = self._request(job)

    def granted(self, job: RayJob) -> None:
        """Ray has granted a job's placement group, or the job wants it no more: another job may ask."""
        if job.group_pending:
            job.group_pending = False
            for other in self._jobs.values():
                if other.turn is not None and not other.turn.done():
                    other.turn.set_result(None)
                    return

    def release(self, job: RayJob) -> None:
        """Hand a job's placement group over to the next job of the same shape, or return it to Ray."""
        from ray.util.placement_group import remove_placement_group

        group, job.group = job.group, None
        turn = None if job.group_pending else heir(job, self._jobs.values())
        if turn is not None:
            turn.set_result(group)
        elif group is not None:
            remove_placement_group(group)
        self.granted(job)

    def avoided(self, job: RayJob) -> tuple[str, ...]:
        """Machines that a job must not get."""
        if not job.suspects:
            return job.request.avoid
        return machines_to_avoid(job.request, job.suspects, list(self._machines().values()))

    def node_name(self, node: str) -> str:
        """The name of a node for people, by Ray's id; Ray is asked only for new nodes."""
        if node not in self._node_names:
            self._node_names = {number: machine.name for number, machine in self._machines().items()}
        return self._node_names.get(node, node)

    def _machines(self) -> Any:
        return machines_from_nodes(self._ray.nodes(), {})

    def _request(self, job: RayJob) -> Any:
        """Ask Ray for a placement group with one bundle per machine."""
        from ray.util.placement_group import placement_group

        avoid = self.avoided(job)
        nodes = [node for node, machine in self._machines().items() if machine.name in avoid] if avoid else []
        bundles = [bundle(job.request)] * job.request.machines
        selector = [{"ray.io/node-id": f"!in({','.join(nodes)})"}] * len(bundles) if nodes else None
        return placement_group(
            bundles,
            strategy=placement_strategy(job.request),
            name=f"{self._prefix}{job.id}",
            bundle_label_selector=selector,
        )


def heir(job: RayJob, jobs: Iterable[RayJob]) -> "asyncio.Future[Any] | None":
    """The turn of the first job that waits for the same resources; it may overtake only jobs of the same shape."""
    shape = resource_shape(job.request)
    for other in jobs:
        if other.state == "waiting" and resource_shape(other.request) != shape:
            return None
        if other.turn is not None and not other.turn.done():
            return other.turn
    return None
