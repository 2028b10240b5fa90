"""A run from start to end, over as many attempts as it takes: run an attempt, decide how to recover, try again.

Failures are classified here (failures.py), decided on in recover.py, and recovered from by the next attempt.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from headway.agent.attempt import Attempt
from headway.agent.fd_store import FdStore
from headway.agent.nodes.leader import acquire_store_lease, lead_nodes
from headway.agent.nodes.lease import MINORITY_S, LeaseSuperseded
from headway.agent.saving.coordinator import SaveCoordinator
from headway.agent.saving.restore_points import RestoreChoice, find_restore_options, need_store
from headway.agent.supervise.attempt_runner import POLL_S, AgentContext, AttemptResult, emergency_save, run_attempt
from headway.agent.supervise.failures import classify_failure, failures_before, last_step
from headway.agent.supervise.no_progress import fail_without_progress
from headway.agent.supervise.outcome import AttemptEnd, AttemptOutcome
from headway.agent.supervise.recover import Failure, RecoveryRules, Situation, recover
from headway.agent.supervise.stop_signals import StopSignals, count_stop_signals
from headway.agent.supervise.storage_monitor import FolderMonitor, StorageReporter
from headway.agent.supervise.tracker_process import TrackerProcess
from headway.agent.supervise.worker_monitor import WorkerMonitor
from headway.agent.workers.env import worker_environment
from headway.agent.workers.worker_group import WorkerGroup
from headway.agent.workers.workers import Workers
from headway.agent.workers.zygote import ZygoteClient
from headway.errors import RunError
from headway.recipe import Recipe
from headway.track import Recorder, RunFolder, lock_run, read_recipe, record_path, write_json
from headway.track.access import umask_of
from headway.track.folder_identity import FolderIdentity, compare_folders, identify, open_identity
from headway.track.store.at_end import compact_in_background

if TYPE_CHECKING:
    from headway.agent.nodes.store_lease import StoreLease
    from headway.agent.remote.store_mirror import RunCopy, StoreMirror


def supervise_run(
    attempt: Attempt,
    on_tick: Callable[[int], None] = lambda _stops_requested: None,
    warm: ZygoteClient | None = None,
    fd_store: FdStore | None = None,
) -> AttemptOutcome:
    """Run to the end, over as many attempts as it takes; `on_tick` is called a few times per second for a live view.

    The first SIGINT or SIGTERM has the workers save and stop, a later one stops them at once. Workers are forked
    from `warm` if there is such a zygote, which is left running; else from one of the run's own. `fd_store` holds
    what an agent that died has left with its launcher.
    """
    fd_store, first = fd_store or FdStore(), attempt
    orphaned = fd_store.get("attempt")
    if orphaned is not None:
        first, attempt = (Attempt.model_validate(orphaned.fields[which]) for which in ("first", "now"))
    try:
        with umask_of(attempt.run):
            outcome = _supervise(first, attempt, on_tick, warm, fd_store, orphaned is not None)
            compact_in_background(attempt.folder)
            return outcome
    except LeaseSuperseded:
        text = "another machine's agent leads this run now; nothing was written since"
        return AttemptOutcome("failed", text, attempt.folder.command("logs"))


def _supervise(
    first: Attempt,
    attempt: Attempt,
    on_tick: Callable[[int], None],
    warm: ZygoteClient | None,
    fd_store: FdStore,
    orphaned: bool,
) -> AttemptOutcome:
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
            _tick(on_tick, stop_signals, store_lease, folder)
            trackers.tick(recorder)

        agent = AgentContext(
            stop_signals,
            workers,
            saves,
            monitor,
            fd_store,
            lambda: tick(agent.recorder),
            first.workers,
            _recorder(attempt),
            StorageReporter(folder.trouble, fd_store.tell_storage, outage_s),
            outage_s,
            retry_s=recipe.checkpoint.retry_s,
        )
        while True:
            fd_store.put("attempt", first=first.model_dump(mode="json"), now=attempt.model_dump(mode="json"))
            with contextlib.closing(agent.recorder):
                # 1 run the attempt, or go on watching the workers of an agent that died
                result = _take_over(attempt, agent) if orphaned else None
                result, choice, orphaned = result or run_attempt(attempt, agent), None, False
                # 2 decide how to recover
                left = result.failure is not None and result.failure.cause == "left"
                if (result.outcome.state == "failed" or left) and stop_signals.asked < 2 and attempt.trial is None:
                    result, choice = _recover(attempt, first, result, agent)
                result = replace(result, outcome=fail_without_progress(attempt, result.outcome))
                # 3 record its end
                failure = None if left else result.failure
                fields: dict[str, Any] = {} if failure is None else {"failure": asdict(failure)}
                fields |= {} if choice is None else {"recovery": choice.recovery.reason}
                agent.recorder.event("end", outcome=result.outcome.state, reason=result.outcome.reason, **fields)
            if choice is None:
                workers.finish(result.outcome.exit_status)
                break
            # 4 try again
            if left:
                saves.expect_start()
            attempt = _next_attempt(attempt, choice)
            why = result.outcome.reason if result.failure is None else result.failure.what
            workers.restart(attempt, choice.recovery.avoid, why, result.end.zygote_died)
            agent.recorder = _recorder(attempt)
        on_tick(stop_signals.asked)
    return result.outcome


# -- recovery


def _recover(
    attempt: Attempt, first: Attempt, result: AttemptResult, agent: AgentContext
) -> tuple[AttemptResult, RestoreChoice | None]:
    """After a failed attempt: classify the failure, decide, and save what there is if the run is over."""
    run, saves, workers = attempt.folder, agent.saves, agent.workers
    if (trouble := agent.wait_for_storage()) is not None:
        emergency_save(run, agent, upload=True)
        where = "; the newest state is in the object store" if saves.uploaded else ""
        hint = f"repair the storage, then {run.command('resume')}"
        outcome = AttemptOutcome("stopped", f"{result.outcome.reason}; {trouble}{where}", hint)
        return replace(result, outcome=outcome), None
    failure = result.failure or classify_failure(attempt, result.end, result.outcome, saves.memory.step)
    workers.survey()
    failure = replace(failure, node=workers.node_of(failure))
    result, choice = replace(result, failure=failure), _decide(attempt, first, failure, agent)
    recovery = choice.recovery
    # An agent that lost most of its nodes may be the one that is cut off: the others get time to resume without it.
    pause = max(recovery.pause_s, MINORITY_S if workers.minority else 0.0)
    if recovery.action == "restart" and not agent.stop_signals.asked and _pause(pause, agent):
        return result, choice
    emergency_save(run, agent)
    if failure.cause != "other" and read_recipe(run).train.restarts and not agent.stop_signals.asked:
        reason = recovery.reason + result.outcome.reason.removeprefix(failure.what)
        result = replace(result, outcome=replace(result.outcome, reason=reason))
    return result, None


def _decide(attempt: Attempt, first: Attempt, failure: Failure, agent: AgentContext) -> RestoreChoice:
    """Describe the situation and ask `recover`."""
    run, recipe, memory_step = attempt.folder, read_recipe(attempt.folder), agent.saves.memory.step
    before = () if attempt.source is None else failures_before(run, attempt.number)
    options = find_restore_options(run, recipe, first, (*before, failure), None if memory_step < 0 else memory_step)
    agent.workers.attend()
    capacity = agent.workers.capacity(recipe, attempt, first.workers)
    situation = Situation(failure, before, recovery_rules(recipe), options.states, places=capacity)
    return options.take(recover(situation, time.time()))


def _take_over(attempt: Attempt, agent: AgentContext) -> AttemptResult | None:
    """Take over the memory of an agent that died, and its workers if they were well under way.

    If they were not, the attempt has failed.
    """
    workers, saves, recorder = agent.workers, agent.saves, agent.recorder
    saves.start(attempt.number, attempt.workers, recorder, read_recipe(attempt.folder))
    for rank, channel in workers.adopt().items():
        saves.listen(rank, channel)
    saves.take_over()
    reached = max(saves.memory.step, last_step(attempt.folder, attempt))
    failure = Failure("agent died", workers.takeover or "the agent died", reached + 1, reached, at=time.time())
    if not workers.has_workers:
        saves.end()
        outcome = AttemptOutcome("failed", failure.what, attempt.folder.command("resume"))
        return AttemptResult(outcome, AttemptEnd(), failure)
    recorder.event("adopted", text=recover(Situation(failure, workers_live=True), time.time()).reason)
    return None


def recovery_rules(recipe: Recipe) -> RecoveryRules:
    """What a recipe says about failures."""
    health = recipe.health
    return RecoveryRules(recipe.train.restarts, health.if_not_finite, health.if_spike, health.rate_factor)


def _pause(seconds: float, agent: AgentContext) -> bool:
    """Wait before the next attempt; False when a stop is requested meanwhile."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not agent.stop_signals.asked:
        time.sleep(POLL_S)
        agent.tick()
    return not agent.stop_signals.asked


def _next_attempt(attempt: Attempt, choice: RestoreChoice) -> Attempt:
    """The attempt that carries out a recovery, with the recipe that it needs."""
    recovery, run = choice.recovery, attempt.folder
    recipe = read_recipe(run)
    changed: dict[str, Any] = {}
    if recovery.skip is not None:
        skip = tuple(sorted((*recipe.data.skip, recovery.skip)))
        changed["data.skip"] = [recipe.data.skip, skip]
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"skip": skip})})
    if recovery.cut is not None:
        cuts = (*recipe.train.rate_cuts, recovery.cut)
        changed["train.rate_cuts"] = [recipe.train.rate_cuts, cuts]
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"rate_cuts": cuts})})
    if changed:
        write_json(run.recipe_file, recipe.model_dump())
    return attempt.model_copy(
        update={
            "number": attempt.number + 1,
            "workers": recovery.workers or attempt.workers,
            "checkpoint": choice.address,
            "from_memory": recovery.source == "memory",
            "source": recovery.source,
            "from_step": recovery.step,
            "recipe_changes": changed,
            "judge": choice.judge,
            "doubt": choice.doubt,
            "accept": (*attempt.accept, *([] if recovery.accept is None else [recovery.accept])),
            "notes": [recovery.reason],
        }
    )


# -- what an agent needs


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


def _tick(
    on_tick: Callable[[int], None],
    stop_signals: StopSignals,
    store_lease: "StoreLease | None",
    folder: FolderMonitor,
) -> None:
    if folder.superseded or (store_lease is not None and store_lease.superseded):
        raise LeaseSuperseded
    on_tick(stop_signals.asked)


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


def _recorder(attempt: Attempt) -> Recorder:
    return Recorder(
        record_path(attempt.folder.events, attempt.number, "agent"), attempt=attempt.number, process="agent"
    )
