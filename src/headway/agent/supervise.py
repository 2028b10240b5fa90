"""A run on this machine from here to its end: start the workers, watch them, find the way on when something breaks.

`supervise` is the whole life in the order it happens, `_live` that of one attempt. They never touch a tensor: workers
are forked by the zygote, tell their story in the run's event files, mark where they are in shared memory, leave their
state in the agent's memory, and are told to stop by a signal. What goes wrong is gathered here, decided in recover.py.
"""

import contextlib
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from headway.agent.attempt import Attempt, assignment, worker_environment
from headway.agent.crew import Crew
from headway.agent.failures import Ended, as_fields, failure_of, failures_before, last_step, left_behind
from headway.agent.kept import Kept
from headway.agent.lookout import Lookout
from headway.agent.outcome import Outcome, explain_exit, out_of_memory_kills
from headway.agent.recover import Failure, Rules, Situation, recover
from headway.agent.saves import Saves
from headway.agent.states import Way, ways
from headway.agent.wishes import Wishes, listen
from headway.agent.zygote import Zygote, ZygoteDied, last_lines
from headway.errors import HeadwayError, WorkerError
from headway.recipe import Recipe
from headway.state import list_checkpoints
from headway.track import Recorder, RunFolder, hold, read_recipe, read_record, record_path, write_json

__all__ = ["supervise"]

POLL_S = 0.15
SIGN_OF_LIFE_S = 1.0
STOOD_STILL_S = 2.0
"""An agent that was stopped, or held up, for so long says so."""
LAST_WORDS_S = 1.0
"""How long the others may still report after the first worker failed."""


class _StoppedEarly(Exception):
    """A stop was asked for before there was a worker to tell."""


@dataclass
class _Agent:
    """What an agent has from its beginning to its end."""

    wishes: Wishes
    crew: Crew
    saves: Saves
    lookout: Lookout
    kept: Kept
    tick: Callable[[], None]
    recorder: Recorder
    """Of the attempt under way."""
    _last: float = field(default_factory=time.monotonic)
    _signed: float = 0.0

    def pulse(self) -> None:
        """Called again and again; writes a sign of life now and then, so that a killed agent's time is not lost."""
        now = time.monotonic()
        if now - self._last > STOOD_STILL_S:
            self.recorder.event("woken", text=f"the agent stood still for {now - self._last:.1f} s; the run went on")
        if now - self._signed >= SIGN_OF_LIFE_S:
            self._signed = now
            self.recorder.event("alive")
        self._last = now
        if not self.kept.alive() and not self.wishes.asked:
            # Whoever killed the keeper wanted an end.
            self.wishes.asked = 1
            self.recorder.event("alone", text="the command that runs it was killed: saving and stopping")
        self.tick()


def supervise(
    attempt: Attempt,
    on_tick: Callable[[int], None] = lambda _stops_asked: None,
    warm: Zygote | None = None,
    kept: Kept | None = None,
) -> Outcome:
    """Run to the end, over as many attempts as it takes; `on_tick` is called a few times a second for a live view.

    The first SIGINT or SIGTERM has the workers save and stop, the second stops them at once. Workers are forked
    from `warm` if there is such a zygote, which is left running; else from one of the run's own. `kept` is what an
    agent that died has left with its keeper.
    """
    run, kept = attempt.folder, kept or Kept()
    recipe, first, orphaned = read_recipe(run), attempt, kept.take("attempt")
    if orphaned is not None:
        first, attempt = (Attempt.model_validate(orphaned.fields[which]) for which in ("first", "now"))
    with (
        hold(run),
        listen() as wishes,
        contextlib.closing(Saves(run, recipe, attempt.faults, kept)) as saves,
        _zygote(attempt, warm, kept) as zygote,
        contextlib.closing(Lookout(run, recipe, attempt.workers, attempt.faults, kept)) as lookout,
        contextlib.ExitStack() as later,
        contextlib.closing(Crew(zygote, kept)) as crew,
    ):
        agent = _Agent(wishes, crew, saves, lookout, kept, lambda: on_tick(wishes.asked), _recorder(attempt))
        while True:
            kept.put("attempt", first=first.model_dump(mode="json"), now=attempt.model_dump(mode="json"))
            with contextlib.closing(agent.recorder):
                life = None if orphaned is None else _inherit(attempt, agent)
                life, way, orphaned = life or _live(attempt, agent), None, None
                if life.outcome.state == "failed" and wishes.asked < 2 and attempt.trial is None:
                    life, way = _find_a_way(attempt, first, life, agent)
                told: dict[str, Any] = {} if life.failure is None else {"failure": as_fields(life.failure)}
                told |= {} if way is None else {"recovery": way.recovery.reason}
                agent.recorder.event("end", outcome=life.outcome.state, reason=life.outcome.reason, **told)
            if way is None:
                break
            attempt = _again(attempt, way)
            agent.recorder = _recorder(attempt)
            if life.ended.zygote_died:
                crew.forget_all()
                crew.zygote = later.enter_context(_zygote(attempt, None, Kept()))
        on_tick(wishes.asked)
    return life.outcome


# -- the way on


@dataclass(frozen=True)
class _Life:
    """How an attempt ended."""

    outcome: Outcome
    ended: Ended
    failure: Failure | None = None


def _find_a_way(attempt: Attempt, first: Attempt, life: _Life, agent: _Agent) -> tuple[_Life, Way | None]:
    """After an attempt that failed: gather the situation, decide, and leave what there is if it is over."""
    run, saves = attempt.folder, agent.saves
    failure = life.failure or failure_of(attempt, life.ended, life.outcome, saves.memory.step)
    life, way = replace(life, failure=failure), _decide(attempt, first, failure, agent)
    recovery = way.recovery
    if recovery.action == "restart" and not agent.wishes.asked and _pause(recovery.pause_s, agent):
        return life, way
    _rescue(run, agent)
    if failure.cause != "other" and read_recipe(run).train.restarts and not agent.wishes.asked:
        reason = recovery.reason + life.outcome.reason.removeprefix(failure.what)
        life = replace(life, outcome=replace(life.outcome, reason=reason))
    return life, None


def _decide(attempt: Attempt, first: Attempt, failure: Failure, agent: _Agent) -> Way:
    """Gather the situation and ask recover."""
    run, recipe, memory = attempt.folder, read_recipe(attempt.folder), agent.saves.memory.step
    before = () if attempt.source is None else failures_before(run, attempt.number)
    known = ways(run, recipe, first, (*before, failure), None if memory < 0 else memory)
    return known.take(recover(Situation(failure, before, rules_of(recipe), known.states), time.time()))


def _inherit(attempt: Attempt, agent: _Agent) -> _Life | None:
    """This agent follows one that died: it takes over the memory, and the workers if they were well under way.

    If they were not, the attempt has failed.
    """
    saves, recorder = agent.saves, agent.recorder
    saves.start(attempt.number, attempt.workers, recorder, read_recipe(attempt.folder))
    agent.crew.take_over()
    for rank, line in agent.crew.lines().items():
        saves.listen(rank, line)
    saves.take_over()
    reached = max(saves.memory.step, last_step(attempt.folder, attempt))
    failure = Failure("agent died", "the agent died", reached + 1, reached, at=time.time())
    if agent.crew.empty:
        saves.end()
        return _Life(Outcome("failed", failure.what, f"headway resume {attempt.run.name}"), Ended(), failure)
    recorder.event("adopted", text=recover(Situation(failure, workers_live=True), time.time()).reason)
    return None


def _rescue(run: RunFolder, agent: _Agent) -> None:
    """A run that fails for good leaves what it has: a state in memory becomes a checkpoint."""
    with agent.recorder.span("checkpoint"):
        agent.saves.finish(agent.pulse, lambda: agent.wishes.asked >= 2, POLL_S)
        agent.saves.rescue(list_checkpoints(run.checkpoints))
        agent.saves.finish(agent.pulse, lambda: agent.wishes.asked >= 2, POLL_S)


def rules_of(recipe: Recipe) -> Rules:
    """What a recipe says of failures."""
    health = recipe.health
    return Rules(recipe.train.restarts, health.if_not_finite, health.if_spike, health.rate_factor)


def _pause(seconds: float, agent: _Agent) -> bool:
    """Wait before another try; False when somebody wants it to stop meanwhile."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not agent.wishes.asked:
        time.sleep(POLL_S)
        agent.pulse()
    return not agent.wishes.asked


def _again(attempt: Attempt, way: Way) -> Attempt:
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


# -- one attempt


def _live(attempt: Attempt, agent: _Agent) -> _Life:
    """One attempt, from the first process to the last word about it."""
    run, saves, recorder, wishes = attempt.folder, agent.saves, agent.recorder, agent.wishes
    ended = Ended()
    kills_before = out_of_memory_kills()
    try:
        if agent.crew.empty:
            _start(attempt, agent)
        # 3 watch them to the end
        _watch_workers(attempt, agent, ended)
        ended.bystanders |= left_behind(attempt)
        recorder.event("begin", name="shutdown")
        saves.end()
        agent.kept.drop("crew")
        # 4 make the last state durable
        if ended.first_failure is None:
            with recorder.span("checkpoint"):
                saves.finish(agent.pulse, lambda: wishes.asked >= 2, POLL_S)
        # 5 say how it ended
        ended.killed_for_memory = out_of_memory_kills() > kills_before
        outcome = explain_exit(run, attempt.number, ended, wishes.asked, saves.unsaved)
        if saves.not_uploaded is not None and outcome.state != "failed":
            outcome = replace(outcome, reason=f"{outcome.reason}; not uploaded: {saves.not_uploaded.message}")
        return _Life(outcome, ended)
    except _StoppedEarly:
        hint = f"headway resume {run.name}"
        return _Life(Outcome("stopped", "stopped on request before the first step", hint), ended)
    except HeadwayError as error:
        ended.zygote_died = isinstance(error, ZygoteDied)
        saves.end()
        return _Life(Outcome("failed", error.message, error.hint), ended)
    finally:
        agent.crew.dismiss()
        shutil.rmtree(run.rendezvous, ignore_errors=True)


def _start(attempt: Attempt, agent: _Agent) -> None:
    """Have workers, and tell each what to do."""
    run, crew, saves, recorder = attempt.folder, agent.crew, agent.saves, agent.recorder
    saves.start(attempt.number, attempt.workers, recorder, read_recipe(run))
    recorder.event(
        "attempt",
        workers=attempt.workers,
        device=attempt.device,
        from_step=attempt.from_step,
        recipe_changes=attempt.recipe_changes,
        source=attempt.source,
    )
    run.rendezvous.mkdir(exist_ok=True)
    # 1 import torch once
    with recorder.span("startup"):
        while not crew.zygote.ready(POLL_S):
            agent.pulse()
            if agent.wishes.asked:
                raise _StoppedEarly
        crew.zygote.keep(agent.kept)
        # 2 fork the workers; those of a class of the user's own need its first weights
        if _needs_drawing(run):
            _draw(attempt, agent)
        crew.fork(attempt.workers)
        agent.lookout.begin()
        with saves.kept_files(attempt.from_memory) as (memory, files):
            for rank in range(attempt.workers):
                descriptors = [agent.lookout.pulses.descriptor, *memory]
                line = crew.assign(assignment(attempt, rank), descriptors, files=files)
                saves.listen(rank, line)


def _watch_workers(attempt: Attempt, agent: _Agent, ended: Ended) -> None:
    """Until every worker has ended: hear exits and saves, pass stops on, look for hangs, end all when one failed."""
    crew, saves, deadline, passed_on, held = agent.crew, agent.saves, None, 0, False
    known = dict[int, int]()
    while len(ended.exits) < attempt.workers:
        select.select([crew.zygote.fileno(), *(line.fileno() for line in saves.lines())], [], [], POLL_S)
        for one in crew.hear():
            ended.exits.append(one)
            agent.recorder.event("exit", rank=one.rank, code=one.code)
        for rank, pid in crew.pids().items():
            if known.get(rank) != pid:
                known[rank] = pid
                agent.recorder.event("worker", rank=rank, pid=pid)
        saves.hear()
        if not held and saves.steady and len(known) == attempt.workers and not ended.exits:
            held = True
            crew.keep()
            crew.fork(attempt.workers)  # spares, for a restart
        agent.pulse()
        passed_on = _pass_stops_on(attempt, agent, passed_on)
        hang = None if ended.exits or ended.hang else agent.lookout.look(attempt, crew.pids(), agent.recorder)
        if hang is not None:
            ended.hang = hang
            _end(crew, ended)
        if ended.first_failure and deadline is None:
            deadline = time.monotonic() + LAST_WORDS_S
        if deadline is not None and time.monotonic() > deadline:
            _end(crew, ended)


def _end(crew: Crew, ended: Ended) -> None:
    """End all workers that are left; nothing of it is their fault."""
    ended.bystanders |= set(crew.pids())
    crew.signal(signal.SIGKILL)


def _pass_stops_on(attempt: Attempt, agent: _Agent, passed_on: int) -> int:
    """A stop asked for before all workers exist waits for the last of them."""
    asked = agent.wishes.asked
    if asked == passed_on:
        return passed_on
    if asked >= 2:
        agent.crew.signal(signal.SIGKILL)
        return passed_on
    if len(agent.crew.pids()) < attempt.workers:
        return passed_on
    agent.crew.signal(signal.SIGTERM)
    return asked


# -- the first weights of a class of the user's own


def _needs_drawing(run: RunFolder) -> bool:
    return read_recipe(run).model.class_ is not None and not list_checkpoints(run.initial)


def _draw(attempt: Attempt, agent: _Agent) -> None:
    """Have a process of its own make the first weights, before there are workers; raises what it could not."""
    crew, asked = agent.crew, agent.wishes
    crew.fork(1)
    crew.assign(assignment(attempt, 0, draw=True), [])
    code = None
    while code is None:
        select.select([crew.zygote.fileno()], [], [], POLL_S)
        code = next((one.code for one in crew.hear()), None)
        agent.pulse()
        if asked.asked:
            crew.signal(signal.SIGKILL)  # it leaves nothing or all
    if asked.asked:
        raise _StoppedEarly
    if code:
        raise _why_not_drawn(attempt.folder, attempt.number, code)


def _why_not_drawn(run: RunFolder, attempt: int, code: int) -> WorkerError:
    """What the drawing process said before it went, or how it went."""
    record, log = record_path(run.events, attempt, "draw"), run.logs / f"{attempt:04d}-draw.log"
    hint = f"headway logs {run.name} shows all of its log"
    for event in reversed(read_record(record).events if record.exists() else []):
        if event["kind"] == "error":
            return WorkerError(event["message"], hint=event["hint"] or hint)
    how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
    return WorkerError(f"the process that draws the weights {how}; the end of its log: {last_lines(log, 3)}", hint=hint)


# -- what an agent needs


@contextlib.contextmanager
def _zygote(attempt: Attempt, warm: Zygote | None, kept: Kept) -> Iterator[Zygote]:
    if warm is not None:
        yield warm
        return
    thing = kept.take("zygote")
    if thing is not None:
        zygote = Zygote.take_over(thing.descriptors[0], **thing.fields)
    else:
        attempt.folder.logs.mkdir(exist_ok=True)
        log = attempt.folder.logs / f"{attempt.number:04d}-zygote.log"
        zygote = Zygote.start(log, worker_environment(attempt))
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
