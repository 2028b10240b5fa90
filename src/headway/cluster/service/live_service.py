"""The running service: the control plane, a thread that runs cycles, and the agents of local nodes."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from headway.cluster.scheduler.jobs import Job
from headway.cluster.service.cycle import MAX_GAP_S, run_cycle
from headway.cluster.service.decider import DeciderProcess
from headway.cluster.service.faults import NODE_VARIABLE, VARIABLE
from headway.cluster.service.folds import EVERY_LINES, move_history, take_fold
from headway.cluster.service.metrics import ServiceMetrics
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import DamagedRecord, ServiceStore, Superseded
from headway.cluster.service.webhooks import EventWebhook, WebhookFollower
from headway.errors import EngineError, HeadwayError, UnknownNode

AGENT_CHECK_S = 0.5
LEAST_GAP_S = 0.05
"""Between cycles, however much changes."""
RETRY_S = 1.0
"""Between cycles while the database fails."""
FOLD_RETRY_S = 60.0
_NODE = "headway.cluster.service.node_process"


class LiveService:
    """A control plane with its threads and processes."""

    def __init__(
        self,
        store: ServiceStore,
        plane: ControlPlane,
        log: Callable[[str], None],
        decider: DeciderProcess | None = None,
        history: Path | None = None,
        webhooks: Sequence[EventWebhook] = (),
    ) -> None:
        """`history` is the folder for lines of the record that no start needs any more."""
        self.metrics = ServiceMetrics()
        self.store, self.plane, self.stopping = store, plane, threading.Event()
        self._log, self._decider, self._history = log, decider or DeciderProcess(), history
        self._advisor = decider or DeciderProcess()
        """Answers questions, which may take long, beside the one that decides."""
        self._agents: dict[str, tuple[list[str], subprocess.Popen[bytes]]] = {}
        self._threads = [
            threading.Thread(target=run, name=run.__name__)
            for run in (self._run_cycles, self._keep_agents, self._keep_folds, self._release_nodes)
        ]
        followers = [WebhookFollower(webhook, lambda: self.plane.lines, self._count_webhook) for webhook in webhooks]
        self._threads += [
            threading.Thread(target=follower.run, args=(self.stopping,), name="webhook", daemon=True)
            for follower in followers
        ]
        self.failure: HeadwayError | None = None
        """Why the service had to end, if it had to."""

    def start(self) -> None:
        """Begin to schedule."""
        for thread in self._threads:
            thread.start()

    def start_nodes(
        self, names: Sequence[str], folder: Path, url: str, token_file: Path, fingerprint: str | None = None
    ) -> None:
        """Start an agent per local node, and another when it dies. Jobs outlive it, and the next one finds them."""
        fault = os.environ.pop(NODE_VARIABLE, None)
        for name in names:
            command = [sys.executable, "-m", _NODE, name, str(folder / name), url, str(token_file)]
            command += [str(os.getpid()), *filter(None, [fingerprint])]
            environment = os.environ if fault is None else os.environ | {VARIABLE: fault}
            self._agents[name] = command, subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)

    def _keep_agents(self) -> None:
        while not self.stopping.wait(AGENT_CHECK_S):
            for name, (command, process) in list(self._agents.items()):
                if process.poll() == UnknownNode.exit_status:
                    del self._agents[name]  # it was removed, as the agent has said
                elif process.returncode is not None:
                    self._log(f"the agent of node {name} ended with status {process.returncode}; starting another")
                    self._agents[name] = command, subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._end_agents()  # before they find that nobody answers them

    def _end_agents(self) -> None:
        for _, agent in self._agents.values():
            agent.terminate()

    def _keep_folds(self) -> None:
        while not self.stopping.wait(AGENT_CHECK_S):
            lines = self.store.lines
            if len(lines) - lines.first < EVERY_LINES:
                continue
            try:
                take_fold(self.store)
                if self._history is not None:
                    move_history(self.store, self._history)
            except (EngineError, OSError) as error:
                self._log(f"the record could not be folded: {error}")
                self.stopping.wait(FOLD_RETRY_S)

    def _release_nodes(self) -> None:
        """Answer the nodes that wait for changes as soon as the service is to end."""
        self.stopping.wait()
        self.plane.node_changes.close()

    def why(self, job: dict[str, Any]) -> dict[str, Any]:
        """Explain the state of a job: by the scheduler if it waits there, else by what is recorded."""
        waits = job["state"] == "waiting" and not job["held"] and job["offered"]
        if waits:
            return job | {"why": self._advisor.why(self.plane.lines, self.plane.now_s, job["id"])}
        return job | {"why": None}

    def simulate(self, job: Job | None, policy: str | None) -> dict[str, Any]:
        """What a new job or another policy would change."""
        return self._advisor.simulate(self.plane.lines, self.plane.now_s, job, policy)

    def tenant_usage(self) -> dict[str, Any]:
        """What tenants hold, wait for and have spent this month."""
        return self._advisor.tenants(self.plane.lines, self.plane.now_s)

    def _count_webhook(self, outcome: str, count: int) -> None:
        self.metrics.webhooks.labels(outcome).inc(count)

    def _run_cycles(self) -> None:
        outdated = False
        while not self.stopping.is_set():
            if not outdated:
                self.stopping.wait(LEAST_GAP_S)  # what comes meanwhile is decided together
                self.plane.changed.wait(MAX_GAP_S)
            self.plane.changed.clear()
            began = time.monotonic()
            try:
                with self.store.lock if outdated else nullcontext():  # what interferes waits, the second time
                    report = run_cycle(self.plane, self._decider)
                outdated = report.outdated
                self.metrics.cycle_s.observe(time.monotonic() - began)
                self.metrics.started.inc(report.started)
                self.metrics.stopped.inc(report.stopped)
            except (Superseded, DamagedRecord) as error:
                self.failure = error
                self.stopping.set()
            except EngineError as error:
                self.metrics.failures.inc()
                self._log(f"{error.message}; trying again")
                self.stopping.wait(RETRY_S)

    def close(self) -> None:
        """End threads and agents; jobs go on."""
        self.stopping.set()
        self.plane.changed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._end_agents()
        for _, agent in self._agents.values():
            agent.wait()
        self._decider.close()
        self._advisor.close()
        self.store.close()
