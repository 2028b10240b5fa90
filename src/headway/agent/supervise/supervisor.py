"""A run from here to its end, over as many attempts as it takes (attempt_runner.py): find the way on when something breaks.

What goes wrong is gathered here, decided in recover.py, and carried out by the next attempt.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.agent.attempt import Attempt
from headway.agent.fd_store import FdStore
from headway.agent.launch.mesh_checks import mesh_can_run
from headway.agent.nodes.leader import acquire_store_lease, lead_nodes
from headway.agent.nodes.lease import MINORITY_S, LeaseSuperseded
from headway.agent.nodes.node_group import NodeGroup
from headway.agent.saving.coordinator import SaveCoordinator
from headway.agent.saving.restore_points import RestoreChoice, find_restore_options, need_store
from headway.agent.supervise.attempt_runner import POLL_S, AgentContext, AttemptResult, emergency_save, run_attempt
from headway.agent.supervise.failures import AttemptEnd, as_fields, classify_failure, failures_before, last_step
from headway.agent.supervise.outcome import AttemptOutcome
from headway.agent.supervise.recover import SUSPECT, Failure, NodeCapacity, RecoveryRules, Situation, recover
from headway.agent.supervise.stop_signals import StopSignals, count_stop_signals
from headway.agent.supervise.worker_monitor import WorkerMonitor
from headway.agent.workers.env import worker_environment
from headway.agent.workers.worker_group import WorkerGroup
from headway.agent.workers.zygote import ZygoteClient
from headway.recipe import Recipe
from headway.track import Recorder, lock_run, read_recipe, record_path, write_json
from headway.track.suspects import note_suspect

if TYPE_CHECKING:
    from headway.agent.nodes.store_lease import StoreLease
    from headway.agent.remote.store_mirror import StoreMirror

__all__ = ["supervise_run"]


def supervise_run(
    attempt: Attempt,
    on_tick: Callable[[int], None] = lambda _stops_asked: None,
    warm: ZygoteClient | None = None,
    kept: FdStore | None = None,
) -> AttemptOutcome:
    """Run to the end, over as many attempts as it takes; `on_tick` is called a few times a second for a live view.

    The first SIGINT or SIGTERM has the workers save and stop, a later one stops them at once. Workers are forked
    from `warm` if there is such a zygote, which is left running; else from one of the run's own. `kept` is what an
    agent that died has left with its keeper.
    """
    kept, first = kept or FdStore(), attempt
    orphaned = kept.get("attempt")
    if orphaned is not None:
        first, attempt = (Attempt.model_validate(orphaned.fields[which]) for which in ("first", "now"))
    try:
        return _supervise(first, attempt, on_tick, warm, kept, orphaned is not None)
    except LeaseSuperseded:
        text = "another machine's agent leads this run now; nothing was written since"
        return AttemptOutcome("failed", text, f"headway logs {attempt.run.name}")


def _supervise(
    first: Attempt,
    attempt: Attempt,
    on_tick: Callable[[int], None],
    warm: ZygoteClient | None,
    kept: FdStore,
    orphaned: bool,
) -> AttemptOutcome:
    run, recipe = attempt.folder, read_recipe(attempt.folder)
    with (
        lock_run(run, seize=kept.get("lease") is not None),
        count_stop_signals() as wishes,
        contextlib.ExitStack() as later,
        _alone_by_lease(attempt, kept) as witness,
        _workers(attempt, warm, kept) as crew,
        contextlib.closing(WorkerMonitor(run, recipe, attempt.workers, attempt.faults, kept)) as lookout,
        contextlib.closing(
            SaveCoordinator(run, recipe, attempt.faults, kept, _team(crew), None if witness is None else witness.holds)
        ) as saves,
    ):
        if attempt.apart:
            mirror = later.enter_context(contextlib.closing(_mirror(attempt, recipe, _team(crew), witness)))
            saves.before_upload(mirror.flush)
        agent = AgentContext(
            wishes,
            crew,
            saves,
            lookout,
            kept,
            lambda: _tick(on_tick, wishes, witness),
            first.workers,
            _recorder(attempt),
        )
        while True:
            kept.put("attempt", first=first.model_dump(mode="json"), now=attempt.model_dump(mode="json"))
            with contextlib.closing(agent.recorder):
                life = _inherit(attempt, agent) if orphaned else None
                life, way, orphaned = life or run_attempt(attempt, agent), None, False
                if life.outcome.state == "failed" and wishes.asked < 2 and attempt.trial is None:
                    life, way = _find_a_way(attempt, first, life, agent)
                told: dict[str, Any] = {} if life.failure is None else {"failure": as_fields(life.failure)}
                told |= {} if way is None else {"recovery": way.recovery.reason}
                agent.recorder.event("end", outcome=life.outcome.state, reason=life.outcome.reason, **told)
            if way is None:
                if isinstance(crew, NodeGroup):
                    crew.status = life.outcome.exit_status
                break
            attempt = _again(attempt, way)
            if isinstance(crew, NodeGroup):
                _suspect(crew, way, life, attempt)
                crew.claim()
            agent.recorder = _recorder(attempt)
            if life.ended.zygote_died and isinstance(crew, WorkerGroup):
                crew.forget_all()
                crew.zygote = later.enter_context(_zygote(attempt, None, FdStore()))
        on_tick(wishes.asked)
    return life.outcome


# -- the way on


def _find_a_way(
    attempt: Attempt, first: Attempt, life: AttemptResult, agent: AgentContext
) -> tuple[AttemptResult, RestoreChoice | None]:
    """After an attempt that failed: gather the situation, decide, and leave what there is if it is over."""
    run, saves = attempt.folder, agent.saves
    failure = life.failure or classify_failure(attempt, life.ended, life.outcome, saves.memory.step)
    if isinstance(agent.crew, NodeGroup):
        agent.crew.look_around()
        failure = replace(failure, node=_node_of(failure, agent.crew))
    life, way = replace(life, failure=failure), _decide(attempt, first, failure, agent)
    recovery = way.recovery
    # Who has lost most of its nodes may be the one that is cut off: the others are given time to go on without it.
    pause = max(recovery.pause_s, MINORITY_S if isinstance(agent.crew, NodeGroup) and agent.crew.minority else 0.0)
    if recovery.action == "restart" and not agent.wishes.asked and _pause(pause, agent):
        return life, way
    emergency_save(run, agent)
    if failure.cause != "other" and read_recipe(run).train.restarts and not agent.wishes.asked:
        reason = recovery.reason + life.outcome.reason.removeprefix(failure.what)
        life = replace(life, outcome=replace(life.outcome, reason=reason))
    return life, None


def _decide(attempt: Attempt, first: Attempt, failure: Failure, agent: AgentContext) -> RestoreChoice:
    """Gather the situation and ask recover."""
    run, recipe, memory = attempt.folder, read_recipe(attempt.folder), agent.saves.memory.step
    before = () if attempt.source is None else failures_before(run, attempt.number)
    known = find_restore_options(run, recipe, first, (*before, failure), None if memory < 0 else memory)
    places = None if isinstance(agent.crew, WorkerGroup) else _places(recipe, attempt, first, agent.crew)
    situation = Situation(failure, before, recovery_rules(recipe), known.states, places=places)
    return known.take(recover(situation, time.time()))


def _suspect(team: NodeGroup, way: RestoreChoice, life: AttemptResult, attempt: Attempt) -> None:
    """Do without the machine that a recovery says is bad, now and when an engine starts the run again."""
    member = team.members.get(way.recovery.avoid)
    if member is not None:
        why = life.outcome.reason if life.failure is None else life.failure.what
        team.suspects[member.machine] = why
        if attempt.host is not None:
            note_suspect(attempt.folder, member.machine, f"{why}, in {SUSPECT} attempts in a row", time.time())


def _node_of(failure: Failure, team: NodeGroup) -> str:
    """Where it happened, if anybody can say."""
    if failure.cause == "lost":
        return failure.place
    return team.place(failure.rank).name if failure.rank is not None else ""


def _places(recipe: Recipe, attempt: Attempt, first: Attempt, team: NodeGroup) -> NodeCapacity:
    """How many workers the nodes that are left have room for, and with how many this run could go on."""
    team.attend()
    able = tuple((member.name, member.slots) for member in team.able())
    counts = tuple(count for count in range(1, first.workers + 1) if mesh_can_run(recipe, count))
    return NodeCapacity(attempt.workers, able, counts, min(recipe.train.fewest_workers, first.workers))


def _inherit(attempt: Attempt, agent: AgentContext) -> AttemptResult | None:
    """This agent follows one that died: it takes over the memory, and the workers if they were well under way.

    If they were not, the attempt has failed.
    """
    saves, recorder = agent.saves, agent.recorder
    saves.start(attempt.number, attempt.workers, recorder, read_recipe(attempt.folder))
    if isinstance(agent.crew, WorkerGroup):
        agent.crew.take_over()
        for rank, line in agent.crew.lines().items():
            saves.listen(rank, line)
    saves.take_over()
    reached = max(saves.memory.step, last_step(attempt.folder, attempt))
    what = "the agent died"
    if isinstance(agent.crew, NodeGroup) and agent.crew.after:
        what = f"leader {agent.crew.after} was lost; {agent.crew.right.lead} is the new leader"
    failure = Failure("agent died", what, reached + 1, reached, at=time.time())
    if isinstance(agent.crew, NodeGroup) or agent.crew.empty:
        saves.end()
        return AttemptResult(
            AttemptOutcome("failed", failure.what, f"headway resume {attempt.run.name}"), AttemptEnd(), failure
        )
    recorder.event("adopted", text=recover(Situation(failure, workers_live=True), time.time()).reason)
    return None


def recovery_rules(recipe: Recipe) -> RecoveryRules:
    """What a recipe says of failures."""
    health = recipe.health
    return RecoveryRules(recipe.train.restarts, health.if_not_finite, health.if_spike, health.rate_factor)


def _pause(seconds: float, agent: AgentContext) -> bool:
    """Wait before another try; False when somebody wants it to stop meanwhile."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not agent.wishes.asked:
        time.sleep(POLL_S)
        agent.pulse()
    return not agent.wishes.asked


def _again(attempt: Attempt, way: RestoreChoice) -> Attempt:
    """The attempt that carries a recovery out, with the recipe that it needs."""
    recovery, run = way.recovery, attempt.folder
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
            "checkpoint": way.address,
            "from_memory": recovery.source == "memory",
            "source": recovery.source,
            "from_step": recovery.step,
            "recipe_changes": changed,
            "judge": way.judge,
            "doubt": way.doubt,
            "accept": (*attempt.accept, *([] if recovery.accept is None else [recovery.accept])),
            "notes": [recovery.reason],
        }
    )


# -- what an agent needs


@contextlib.contextmanager
def _workers(attempt: Attempt, warm: ZygoteClient | None, kept: FdStore) -> Iterator[WorkerGroup | NodeGroup]:
    """Those of this machine, or of several nodes."""
    if attempt.multi_node:
        with lead_nodes(attempt, kept) as team:
            yield team
        return
    with _zygote(attempt, warm, kept) as zygote, contextlib.closing(WorkerGroup(zygote, kept)) as crew:
        yield crew


@contextlib.contextmanager
def _alone_by_lease(attempt: Attempt, kept: FdStore) -> "Iterator[StoreLease | None]":
    """The lease in its store of a run that is on this machine alone, and may have been on others before."""
    if attempt.multi_node or not attempt.apart:
        yield None
        return
    with contextlib.closing(acquire_store_lease(attempt, kept, socket.gethostname())) as witness:
        yield witness


def _tick(on_tick: Callable[[int], None], wishes: StopSignals, witness: "StoreLease | None") -> None:
    if witness is not None and witness.overtaken:
        raise LeaseSuperseded
    on_tick(wishes.asked)


def _mirror(attempt: Attempt, recipe: Recipe, team: NodeGroup | None, witness: "StoreLease | None") -> "StoreMirror":
    """Keeps the run's small files and records in its store."""
    from headway.agent.remote.store_mirror import StoreMirror  # only runs that name a store need its library

    witness = witness if team is None else team.right.witness
    number, allowed = (0, lambda: True) if witness is None else (witness.number, witness.holds)
    return StoreMirror(attempt.folder, need_store(recipe, attempt.run.name), number, allowed)


def _team(crew: WorkerGroup | NodeGroup) -> NodeGroup | None:
    return crew if isinstance(crew, NodeGroup) else None


@contextlib.contextmanager
def _zygote(attempt: Attempt, warm: ZygoteClient | None, kept: FdStore) -> Iterator[ZygoteClient]:
    if warm is not None:
        yield warm
        return
    thing = kept.get("zygote")
    if thing is not None:
        zygote = ZygoteClient.take_over(thing.descriptors[0], **thing.fields)
    else:
        attempt.folder.logs.mkdir(exist_ok=True)
        log = attempt.folder.logs / f"{attempt.number:04d}-zygote.log"
        zygote = ZygoteClient.start(log, worker_environment(attempt))
    try:
        yield zygote
    finally:
        kept.drop("zygote")
        zygote.close()


def _recorder(attempt: Attempt) -> Recorder:
    attempt.folder.events.mkdir(parents=True, exist_ok=True)
    return Recorder(
        record_path(attempt.folder.events, attempt.number, "agent"), attempt=attempt.number, process="agent"
    )
