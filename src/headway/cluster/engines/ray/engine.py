"""The engine of a Ray cluster: one placement group per job, and one process of its command in each bundle.

A detached actor (controller.py) runs the jobs, so that they outlive their submitter. The engine connects to the
cluster, refuses what can never fit, and calls that actor. It needs the extra `ray`, and headway installed on every
node.
"""

import atexit
import getpass
import logging
import os
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from headway.cluster.engines.engine import (
    PROBE_S,
    Engine,
    JobStatus,
    LaunchRequest,
    Machine,
    cannot_signal,
    check_limit,
    secret_values,
    status_from_json,
)
from headway.cluster.engines.ray.liveness import cluster_liveness
from headway.cluster.engines.ray.local_cluster import LOOPBACK, recorded_address, start_local_cluster
from headway.cluster.engines.ray.rules import bundle, machines_from_nodes, placement_strategy, why_never_fits
from headway.cluster.engines.scripts import inherited_environment, list_logs
from headway.cluster.engines.submissions import request_to_json
from headway.errors import EngineError, EngineUnreachable, UsageError
from headway.track import command, runs_root

NAMESPACE = "headway"
ANSWER_S = 60.0
"""Longer than the first process of a cluster needs to start on a busy machine."""
INVENTORY_S = 2.0
"""How long an inventory stays valid: whether jobs can ever fit hardly changes."""
CONNECT_S = 60.0
"""How long a cluster that is alive may take to accept this process; Ray itself would try for ten minutes."""
TRIES = 20
"""Calls may be repeated: job ids come from the client, and a second cancel has no effect."""
HEAD = {"node:__internal_head__": 0.001}
"""The node that holds Ray's own state; without it, everything is lost anyway."""


class RayEngine(Engine):
    """Starts processes on the machines of a Ray cluster."""

    name: ClassVar[str] = "ray"

    def __init__(self, address: str | None = None, *, runs: Path | None = None, probe_s: float = PROBE_S) -> None:
        """`address` is HOST:PORT of the cluster, or `local`: the one on this machine, started if necessary.

        The default is RAY_ADDRESS. `runs` is the folder that hints name; `probe_s` is how long the cluster may take to
        show that it is alive.
        """
        self.address, self.probe_s = address or os.environ.get("RAY_ADDRESS", ""), probe_s
        self._runs = runs_root(runs)
        self._controller: Any = None
        self._inventory: list[Machine] = []
        self._inventory_time = -INVENTORY_S
        if not self.address:
            raise UsageError(
                "no Ray cluster is named",
                hint="set RAY_ADDRESS or `address` to HOST:PORT; `local` starts a cluster on this machine",
            )
        if "://" in self.address:
            raise UsageError(
                f"{self.address}: jobs are submitted from a machine of the cluster", hint="use HOST:PORT there"
            )

    def probe(self) -> None:
        """See Engine: whether the GCS and the raylets that are needed answer. A cluster on this machine is started on
        demand if it is dead."""
        _import_ray(self.address)
        self._live_address()

    def inventory(self) -> list[Machine]:
        """The nodes of the cluster."""
        return sorted(self._machines(), key=lambda machine: machine.name)

    def describe(self, request: LaunchRequest) -> str:
        """The placement group, and what runs in each of its bundles."""
        return _describe(self._complete(request))

    def launch(self, request: LaunchRequest) -> str:
        """See Engine."""
        values = secret_values(request)
        fields, job = request_to_json(self._complete(request)), secrets.token_hex(4)
        self._call("launch", job, fields, values)
        return job

    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        """See Engine."""
        answer = self._call("status", list(jobs)) if jobs else {}
        unknown = JobStatus("unknown", "unknown job")
        return {job: status_from_json(answer[job]) if job in answer else unknown for job in jobs}

    def signal(self, job: str, number: signal.Signals) -> None:
        """See Engine."""
        if not self._call("signal", job, int(number)):
            raise cannot_signal(job, self.status([job])[job].state)

    def logs(self, job: str) -> list[Path]:
        """See Engine."""
        return [path for folder in self._call("logs", job) for path in list_logs(Path(folder))]

    def release(self, job: str) -> bool:  # noqa: ARG002
        """See Engine: Ray holds nothing back."""
        return False

    def cancel(self, job: str) -> None:
        """See Engine."""
        self._call("cancel", job)

    def _complete(self, request: LaunchRequest) -> LaunchRequest:
        """The request with the inherited environment; UsageError if the cluster can never hold it."""
        if time.monotonic() > self._inventory_time + INVENTORY_S:  # not once per job when hundreds are submitted
            self._inventory_time, self._inventory = time.monotonic(), self._machines()
        placement_strategy(request)
        check_limit(request, request.limit_s)
        grows = request.site.get("grows", "no")
        if grows not in ("yes", "no"):
            raise UsageError(f"grows is {grows!r}", hint="expected yes (the cluster adds nodes on demand) or no")
        reason = why_never_fits(request, self._inventory) if grows == "no" else None
        if reason is not None:
            raise UsageError(
                f"job {request.name} can never start: {reason}",
                hint="ask for less; if the cluster adds nodes on demand, set `grows` to yes",
            )
        return replace(request, environment={**inherited_environment(), **request.environment})

    def _machines(self) -> list[Machine]:
        ray = self.connect(start=True)
        from ray._private.state import available_resources_per_node

        with ray_errors(ray):
            return list(machines_from_nodes(ray.nodes(), available_resources_per_node()).values())

    # -- the controller

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the controller; start it if necessary, and repeat the call if it died meanwhile."""
        ray = self.connect()
        with ray_errors(ray):
            tries = 0
            while True:
                self._controller = self._controller or self._get_controller(ray)
                try:
                    return ray.get(getattr(self._controller, method).remote(*arguments), timeout=ANSWER_S)
                except ray.exceptions.RayActorError:
                    self._controller, tries = None, tries + 1
                    if tries == TRIES:
                        raise
                    time.sleep(0.5)  # until Ray notices too

    def _get_controller(self, ray: Any) -> Any:
        """The actor that runs our jobs, created if necessary."""
        from headway.cluster.engines.ray.controller import RayJobController

        user = getpass.getuser()
        return (
            ray.remote(RayJobController)
            .options(
                name=f"headway-{user}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                resources=HEAD,
                max_restarts=-1,
                max_concurrency=100_000,  # every process of a job has a call waiting
            )
            .remote(user)
        )

    # -- the connection

    def connect(self, *, start: bool = False) -> Any:
        """The module ray, connected to this cluster; once per process. A dead cluster on this machine is replaced by a
        new one if it may `start`."""
        ray = _import_ray(self.address)
        if not ray.is_initialized():
            address = self._live_address()
            if address is None and start:
                address = start_local_cluster()
            if address is None:
                raise EngineUnreachable(
                    "no Ray cluster runs on this machine: it ended, and its jobs with it",
                    hint=f"{command(self._runs, 'requeue RUN')} starts a new one",
                )
            logging.getLogger("ray").setLevel(logging.CRITICAL)  # job states tell of lost nodes
            with ray_errors(ray):
                _connect(ray, address)
        return ray

    def _live_address(self) -> str | None:
        """The address of a live cluster, None if there is none on this machine: Ray itself would try for minutes."""
        local = self.address == "local"
        address = recorded_address() if local else self.address
        try:
            liveness = cluster_liveness(address, self.probe_s) if address is not None else None
        except ValueError:
            raise UsageError(f"invalid Ray address {self.address!r}", hint="HOST:PORT or local") from None
        if liveness is None or (local and liveness.state == "dead"):
            return None
        if liveness.loopback:
            _look_on_loopback()
        if liveness.state != "alive":
            within = f" within {self.probe_s:g} s" if liveness.state == "hung" else ""
            raise EngineUnreachable(
                f"no Ray cluster answers at {address}{within}: {liveness.reason}",
                hint=f"ray start --head starts one and prints its address; {command(self._runs, 'requeue RUN')} then "
                "restarts a run",
            )
        return address


def _describe(request: LaunchRequest) -> str:
    """A job for people; secrets by name only."""
    resources = ", ".join(f"{name} {amount:g}" for name, amount in bundle(request).items())
    lines = [f"placement group, {placement_strategy(request)}: {request.machines} x {{{resources}}}"]
    if request.array is not None:
        at_once = f", {request.at_once} at a time" if request.at_once else ""
        lines.append(f"once per array task: {request.array}{at_once}")
    if request.avoid:
        lines.append(f"not on {', '.join(request.avoid)}")
    lines += [f"in each bundle, in {request.folder}:"]
    lines += [f"  {name}={shlex.quote(value)}" for name, value in sorted(request.environment.items())]
    lines += [f"  {name}=(from the submitter's environment)" for name in request.secrets]
    lines += [f"  {line}" for line in request.setup]
    lines.append(f"  {shlex.join(request.command)}")
    limit = "none" if request.limit_s is None else f"{request.limit_s:g} s"
    lines.append(f"time limit {limit}, SIGUSR1 {request.grace_s:g} s before a stop")
    return "\n".join(lines) + "\n"


def _import_ray(address: str) -> Any:
    """The module, if it is installed. It reads its variables once, on import."""
    os.environ.update(LOOPBACK if address == "local" else {})
    # Ray would warn of jobs without GPUs, which are normal.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise EngineError("Ray is not installed", hint="pip install 'headway[ray]'") from None
    return ray


def _look_on_loopback() -> None:
    """Have Ray find the raylet of this machine on loopback; it would look for it, and for the GCS, at the main address.

    The variable is for processes that this one starts: Ray has read it on import.
    """
    from ray._private import ray_constants

    os.environ.update(LOOPBACK)
    ray_constants.ENABLE_RAY_CLUSTER = False


def _connect(ray: Any, address: str, limit_s: float = CONNECT_S) -> None:
    """Connect this process; raise EngineUnreachable after `limit_s`.

    In a thread, since Ray waits in C++ code where no signal of Python is handled.
    """
    ended = SimpleQueue[BaseException | None]()

    def connect() -> None:
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    threading.Thread(target=connect, name="ray", daemon=True).start()
    try:
        error = ended.get(timeout=limit_s)
    except Empty:
        atexit.unregister(ray.shutdown)  # it would wait for the thread
        raise EngineUnreachable(
            f"the Ray cluster at {address} answers, but did not accept this process within {limit_s:g} s",
            hint=f"ray status --address {address} shows its state; its logs are in /tmp/ray/session_latest/logs",
        ) from None
    if error is not None:
        raise error


@contextmanager
def ray_errors(ray: Any) -> Iterator[None]:
    """Turn Ray's errors into EngineErrors with its message."""
    try:
        yield
    except ray.exceptions.GetTimeoutError:
        raise EngineError(
            f"the job controller did not answer within {ANSWER_S:.0f} s",
            hint="check that the head node can run one more process, and has headway installed",
        ) from None
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise EngineError(f"Ray error: {_summary(error)}", hint="ray status shows the state of the cluster") from None


def _summary(error: BaseException) -> str:
    """The most telling line of a long message: the last of a traceback, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if any("Traceback" in line for line in lines) else lines[0]
