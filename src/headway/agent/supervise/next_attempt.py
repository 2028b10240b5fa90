"""After an attempt has failed: classify the failure, decide how to recover, and make the attempt that carries it out.

The decision itself is pure: recover.py.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.agent.attempt import Attempt
from headway.agent.nodes.lease import MINORITY_S
from headway.agent.saving.restore_points import RestoreChoice, find_restore_options
from headway.agent.supervise.attempt_runner import POLL_S, AgentContext, AttemptResult, emergency_save
from headway.agent.supervise.failures import classify_failure, failures_before, last_step
from headway.agent.supervise.outcome import AttemptEnd, AttemptOutcome
from headway.agent.supervise.recover import Failure, RecoveryRules, Situation, recover
from headway.recipe import Recipe
from headway.track import read_recipe, write_json

if TYPE_CHECKING:
    pass


def recover_from(
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


def take_over(attempt: Attempt, agent: AgentContext) -> AttemptResult | None:
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


def next_attempt(attempt: Attempt, choice: RestoreChoice) -> Attempt:
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
