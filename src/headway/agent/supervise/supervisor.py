"""A run from start to end, over as many attempts as it takes: run an attempt, decide how to recover, try again.

Failures are classified (failures.py), decided on (recover.py), and recovered from by the next attempt
(next_attempt.py). What outlives an attempt is opened once: open_agent.py.
"""

import contextlib
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from headway.agent.attempt import Attempt
from headway.agent.fd_store import FdStore
from headway.agent.nodes.lease import LeaseSuperseded
from headway.agent.supervise.attempt_runner import run_attempt
from headway.agent.supervise.next_attempt import next_attempt, recover_from, take_over
from headway.agent.supervise.no_progress import fail_without_progress
from headway.agent.supervise.open_agent import agent_recorder, open_agent
from headway.agent.supervise.outcome import AttemptOutcome
from headway.agent.workers.zygote import ZygoteClient
from headway.track.access import umask_of
from headway.track.store.at_end import compact_in_background


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
    with open_agent(first, attempt, on_tick, warm, fd_store) as agent:
        while True:
            fd_store.put("attempt", first=first.model_dump(mode="json"), now=attempt.model_dump(mode="json"))
            with contextlib.closing(agent.recorder):
                # 1 run the attempt, or go on watching the workers of an agent that died
                result = take_over(attempt, agent) if orphaned else None
                result, choice, orphaned = result or run_attempt(attempt, agent), None, False
                # 2 decide how to recover
                left = result.failure is not None and result.failure.cause == "left"
                may_recover = agent.stop_signals.asked < 2 and attempt.trial is None
                if may_recover and (left or result.outcome.state == "failed"):
                    result, choice = recover_from(attempt, first, result, agent)
                result = replace(result, outcome=fail_without_progress(attempt, result.outcome))
                # 3 record its end
                failure = None if left else result.failure
                fields: dict[str, Any] = {} if failure is None else {"failure": asdict(failure)}
                fields |= {} if choice is None else {"recovery": choice.recovery.reason}
                agent.recorder.event("end", outcome=result.outcome.state, reason=result.outcome.reason, **fields)
            if choice is None:
                agent.workers.finish(result.outcome.exit_status)
                break
            # 4 try again
            if left:
                agent.saves.expect_start()
            attempt = next_attempt(attempt, choice)
            why = result.outcome.reason if result.failure is None else result.failure.what
            agent.workers.restart(attempt, choice.recovery.avoid, why, result.end.zygote_died)
            agent.recorder = agent_recorder(attempt)
        on_tick(agent.stop_signals.asked)
    return result.outcome
