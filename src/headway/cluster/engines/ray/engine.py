"""The engine of a Ray cluster: a placement group a job, and one process of its command in each bundle.

An actor owns the jobs (controller.py), detached, so that they live on when whoever submitted them is gone. This file is
what the others call: it connects, refuses what can never fit, and asks that actor. It needs the extra `ray`, and
headway installed on every node of the cluster.
"""

import getpass
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from headway.cluster.engines.engine import Engine, JobStatus, LaunchRequest, Machine, secret_values
from headway.cluster.engines.ray.local_cluster import LOOPBACK, started_here
from headway.cluster.engines.ray.rules import bundle, machines_of, strategy_of, why_never_fits
from headway.cluster.engines.scripts import logs_in, passed_on
from headway.cluster.engines.submissions import request_to_json
from headway.errors import EngineError, UsageError

__all__ = ["RayEngine", "connected", "ray_errors"]

NAMESPACE = "headway"
CONNECT_S = 5.0
ANSWER_S = 60.0
"""Longer than the first process of a cluster needs to start on a busy machine."""
LOOK_S = 2.0
"""How long what machines there are is known: whether a job can ever fit does not change from one to the next."""
TRIES = 20
"""Every question may be asked again: jobs have their ids from here, and are told to end no sooner than once."""
HEAD = {"node:__internal_head__": 0.001}
"""The node that holds Ray's own state: when it is lost, all is."""


class RayEngine(Engine):
    """Starts processes on the machines of a Ray cluster."""

    name: ClassVar[str] = "ray"

    def __init__(self, address: str | None = None) -> None:
        """`address` is HOST:PORT of the cluster, or `local`: the one on this machine, started if it is not there.

        By default it is RAY_ADDRESS.
        """
        self.address = address or os.environ.get("RAY_ADDRESS", "")
        self._owner: Any = None
        self._there: list[Machine] = []
        self._looked = -LOOK_S
        if not self.address:
            raise UsageError(
                "no Ray cluster is named",
                hint="set RAY_ADDRESS or `address` to HOST:PORT; `local` starts a cluster of this machine",
            )
        if "://" in self.address:
            raise UsageError(
                f"{self.address}: jobs are submitted from a machine of the cluster", hint="use HOST:PORT there"
            )

    def inventory(self) -> list[Machine]:
        """The nodes of the cluster."""
        return sorted(self._machines().values(), key=lambda machine: machine.name)

    def describe(self, request: LaunchRequest) -> str:
        """The placement group, and what is run in each of its bundles."""
        from headway.cluster.engines.ray.describe import describe_job

        return describe_job(self._complete(request), bundle(request), strategy_of(request))

    def launch(self, request: LaunchRequest) -> str:
        """Have a job started as soon as there is room; its id."""
        values = secret_values(request)
        fields, job = request_to_json(self._complete(request)), secrets.token_hex(4)
        self._ask("launch", job, fields, values)
        return job

    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        """How jobs stand, by their ids."""
        found = self._ask("status", list(jobs)) if jobs else {}
        unknown = JobStatus("unknown", "no such job is known on this cluster")
        return {job: _status(found[job]) if job in found else unknown for job in jobs}

    def signal(self, job: str, number: signal.Signals) -> None:
        """Have the command of a running job hear a signal on each of its machines."""
        if not self._ask("signal", job, int(number)):
            state = self.status([job])[job].state
            raise EngineError(f"job {job} cannot be signalled: it is {state}", hint="headway jobs shows what runs")

    def logs(self, job: str) -> list[Path]:
        """What its processes print, a file for each machine and start."""
        return [path for folder in self._ask("logs", job) for path in logs_in(Path(folder))]

    def cancel(self, job: str) -> None:
        """Have a job end: SIGUSR1, and after its grace for good."""
        self._ask("cancel", job)

    def _complete(self, request: LaunchRequest) -> LaunchRequest:
        """The request with what it has from here; UsageError if the cluster can never hold it."""
        if time.monotonic() > self._looked + LOOK_S:  # who submits hundreds of jobs need not look for each
            self._looked, self._there = time.monotonic(), list(self._machines().values())
        machines = self._there
        strategy_of(request)
        if request.site.get("grows", "no") not in ("yes", "no"):
            raise UsageError(f"grows is {request.site['grows']!r}", hint="yes where the cluster adds nodes, or no")
        reason = why_never_fits(request, machines) if request.site.get("grows") != "yes" else None
        if reason is not None:
            raise UsageError(
                f"job {request.name} can never start: {reason}",
                hint="ask for less; where the cluster adds nodes by itself, set `grows` to yes",
            )
        return replace(request, environment={**passed_on(), **request.environment})

    def _machines(self) -> dict[str, Machine]:
        ray = connected(self)
        from ray._private.state import available_resources_per_node

        with ray_errors(ray):
            return machines_of(ray.nodes(), available_resources_per_node())

    # -- the owner

    def _ask(self, verb: str, *words: Any) -> Any:
        """What the owner answers. It is started if it is not there; if it died with the question, another is asked."""
        ray = connected(self)
        with ray_errors(ray):
            for _ in range(TRIES - 1):
                self._owner = self._owner or self._make_owner(ray)
                try:
                    return ray.get(getattr(self._owner, verb).remote(*words), timeout=ANSWER_S)
                except ray.exceptions.RayActorError:
                    self._owner = None
                    time.sleep(0.5)  # until Ray knows it too
            return ray.get(getattr(self._make_owner(ray), verb).remote(*words), timeout=ANSWER_S)

    def _make_owner(self, ray: Any) -> Any:
        """The actor that owns our jobs, made if it is not there."""
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
                max_concurrency=100_000,  # each process of a job has a call waiting
            )
            .remote(user)
        )

    def reachable(self) -> str:
        """An address at which somebody listens: Ray itself would try for minutes."""
        if self.address == "local":
            return started_here()
        host, _, port = self.address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=CONNECT_S):
                return self.address
        except ValueError:
            raise UsageError(f"{self.address!r} is no address of a Ray cluster", hint="HOST:PORT or local") from None
        except OSError as error:
            raise EngineError(
                f"no Ray cluster answers at {self.address}: {error.strerror or error}",
                hint="ray start --head prints a cluster's address",
            ) from None


def connected(engine: RayEngine) -> Any:
    """Ray, connected to an engine's cluster; once a process."""
    ray = _ray(engine.address)
    if not ray.is_initialized():
        address = engine.reachable()
        logging.getLogger("ray").setLevel(logging.CRITICAL)  # of nodes that leave the status of jobs tells
        with ray_errors(ray):
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    return ray


def _ray(address: str) -> Any:
    """The module, if it is installed. It looks at its variables once, as it is imported."""
    os.environ.update(LOOPBACK if address == "local" else {})
    # A machine without GPUs for a job is no mistake, of which Ray would warn.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise EngineError("Ray is not installed", hint="pip install 'headway[ray]'") from None
    return ray


class ray_errors:  # noqa: N801 (used as a word: with quoting(ray))
    """Whatever Ray says in here is an EngineError with its own words."""

    def __init__(self, ray: Any) -> None:
        self._errors = (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError)
        self._late = ray.exceptions.GetTimeoutError

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._late):
            raise EngineError(
                f"the actor that owns the jobs has not answered for {ANSWER_S:.0f} s",
                hint="is there room on the head node for one more process, and headway installed there?",
            ) from None
        if isinstance(error, self._errors):
            raise EngineError(f"Ray says: {_short(error)}", hint="ray status shows how the cluster is") from None


def _short(error: BaseException) -> str:
    """The line of a long message that says most: the last one of a traceback, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if any("Traceback" in line for line in lines) else lines[0]


def _status(fields: Mapping[str, Any]) -> JobStatus:
    return JobStatus(**{**fields, "machines": tuple(fields["machines"])})
