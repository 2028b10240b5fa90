"""What an agent has from start to end: the run's lock and folder, its workers, their memory, and what watches them."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from headway.agent.attempt import Attempt
from headway.agent.fd_store import FdStore
from headway.agent.nodes.leader import acquire_store_lease, lead_nodes
from headway.agent.nodes.lease import LeaseSuperseded
from headway.agent.saving.coordinator import SaveCoordinator
from headway.agent.saving.restore_points import need_store
from headway.agent.supervise.attempt_runner import POLL_S, AgentContext
from headway.agent.supervise.stop_signals import count_stop_signals
from headway.agent.supervise.storage_monitor import FolderMonitor, StorageReporter
from headway.agent.supervise.tracker_process import TrackerProcess
from headway.agent.supervise.worker_monitor import WorkerMonitor
from headway.agent.workers.env import worker_environment
from headway.agent.workers.worker_group import WorkerGroup
from headway.agent.workers.workers import Workers
from headway.agent.workers.zygote import ZygoteClient
from headway.errors import RunError
from headway.recipe import Recipe
from headway.track import Recorder, RunFolder, lock_run, read_recipe, record_path
from headway.track.folder_identity import FolderIdentity, compare_folders, identify, open_identity

if TYPE_CHECKING:
    from headway.agent.nodes.store_lease import StoreLease
    from headway.agent.remote.store_mirror import RunCopy, StoreMirror


@contextlib.contextmanager
def open_agent(
    first: Attempt,
    attempt: Attempt,
    on_tick: Callable[[int], None],
    warm: ZygoteClient | None,
    fd_store: FdStore,
) -> Iterator[AgentContext]:
    """Lock a run and start what its attempts need, of which the `first` was asked for; end it all in reverse."""
    run = attempt.folder
    opened = _open_folder(run, fd_store)
    recipe = read_recipe(run)
    outage_s = recipe.checkpoint.outage_s
    fd_store.put("folder", **asdict(opened), outage_s=outage_s)
    with (
        lock_run(run, seize=fd_store.get("lease") is not None) as lock,
        contextlib.closing(FolderMonitor(run, opened, lock.renew)) as folder,
        count_stop_signals() as stop_signals,
        contextlib.ExitStack() as at_the_end,
        _store_lease(attempt, fd_store) as store_lease,
        _start_workers(attempt, warm, fd_store) as workers,
        contextlib.closing(WorkerMonitor(run, recipe, attempt.workers, attempt.faults, fd_store)) as monitor,
        contextlib.closing(
            SaveCoordinator(
                run,
                recipe,
                attempt.faults,
                fd_store,
                workers.memory,
                None if store_lease is None else store_lease.refusal,
                folder,
            )
        ) as saves,
        contextlib.closing(TrackerProcess(run, recipe.track if attempt.trial is None else None)) as trackers,
    ):
        folder.start()
        if attempt.apart:  # closed last: nodes send their last records when they are told that the run is over
            mirror = _mirror(attempt, recipe, store_lease or workers.store_lease)
            at_the_end.callback(mirror.close)
            saves.before_upload(mirror.flush)
        elif recipe.checkpoint.store is not None:
            copy = _copy(attempt, recipe)
            at_the_end.callback(copy.close)
            saves.before_upload(copy.update)

        def tick(recorder: Recorder) -> None:
            if folder.superseded or (store_lease is not None and store_lease.superseded):
                raise LeaseSuperseded
            on_tick(stop_signals.asked)
            trackers.tick(recorder)

        agent = AgentContext(
            stop_signals,
            workers,
            saves,
            monitor,
            fd_store,
            lambda: tick(agent.recorder),
            first.workers,
            agent_recorder(attempt),
            StorageReporter(folder.trouble, fd_store.tell_storage, outage_s),
            outage_s,
            retry_s=recipe.checkpoint.retry_s,
        )
        yield agent


def _open_folder(run: RunFolder, fd_store: FdStore) -> FolderIdentity:
    """Identify the run's folder; where an agent before this one did, wait until that folder is there."""
    entry = fd_store.get("folder")
    if entry is None:
        try:
            return open_identity(run)
        except OSError as error:
            raise RunError(
                f"cannot open the folder of run {run.name}: {error.strerror}",
                hint="check that it exists and is writable",
            ) from error
    fields = dict(entry.fields)
    deadline = time.monotonic() + fields.pop("outage_s")
    opened = FolderIdentity(**fields)
    while compare_folders(opened, now := identify(run)) in ("gone", "replaced") or now is None:
        trouble = f"the run's folder {run.path} is gone, and so is the agent that had it open"
        if time.monotonic() > deadline:
            raise RunError(trouble, hint=f"bring it back, then {run.command('resume')}")
        fd_store.tell_storage(trouble, 0)
        time.sleep(POLL_S)
    fd_store.tell_storage(None, 0)
    return now


@contextlib.contextmanager
def _start_workers(attempt: Attempt, warm: ZygoteClient | None, fd_store: FdStore) -> Iterator[Workers]:
    """The workers of this machine, or of several nodes."""
    if attempt.multi_node:
        with lead_nodes(attempt, fd_store) as nodes:
            yield nodes
        return
    with contextlib.ExitStack() as zygotes:
        zygote = zygotes.enter_context(_zygote(attempt, warm, fd_store))

        def replacement(attempt: Attempt) -> ZygoteClient:
            return zygotes.enter_context(_zygote(attempt, None, FdStore()))

        with contextlib.closing(WorkerGroup(zygote, fd_store, replacement)) as group:
            yield group


@contextlib.contextmanager
def _store_lease(attempt: Attempt, fd_store: FdStore) -> "Iterator[StoreLease | None]":
    """The lease in the object store of a run that is on this machine alone, and may have been on others before."""
    if attempt.multi_node or not attempt.apart:
        yield None
        return
    with contextlib.closing(acquire_store_lease(attempt, fd_store, socket.gethostname())) as lease:
        yield lease


def _mirror(attempt: Attempt, recipe: Recipe, lease: "StoreLease | None") -> "StoreMirror":
    """Copies the run's small files and records to its object store, where machines share no folder."""
    from headway.agent.remote.store_mirror import StoreMirror  # only runs that name a store need its library

    number, allowed = (0, lambda: True) if lease is None else (lease.number, lease.holds)
    return StoreMirror(attempt.folder, need_store(recipe, attempt.run.name), number, allowed)


def _copy(attempt: Attempt, recipe: Recipe) -> "RunCopy":
    """Copies them with each checkpoint, where machines share the folder: any machine can resume the run."""
    from headway.agent.remote.store_mirror import RunCopy

    return RunCopy(attempt.folder, need_store(recipe, attempt.run.name))


@contextlib.contextmanager
def _zygote(attempt: Attempt, warm: ZygoteClient | None, fd_store: FdStore) -> Iterator[ZygoteClient]:
    if warm is not None:
        yield warm
        return
    entry = fd_store.get("zygote")
    if entry is not None:
        zygote = ZygoteClient.take_over(entry.descriptors[0], **entry.fields)
    else:
        attempt.folder.logs.mkdir(exist_ok=True)
        log = attempt.folder.logs / f"{attempt.number:04d}-zygote.log"
        zygote = ZygoteClient.start(log, worker_environment(attempt))
    try:
        yield zygote
    finally:
        fd_store.drop("zygote")
        zygote.close()


def agent_recorder(attempt: Attempt) -> Recorder:
    """Open the agent's record of an attempt."""
    return Recorder(
        record_path(attempt.folder.events, attempt.number, "agent"), attempt=attempt.number, process="agent"
    )
