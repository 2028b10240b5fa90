"""The agent: one process per node that starts, watches and restarts the workers of a run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.agent.attempt import Attempt
    from headway.agent.launch.branch import recipe_of_ref, stated_recipe
    from headway.agent.launch.launcher import run_launcher
    from headway.agent.launch.prepare import new_run, resume_run
    from headway.agent.supervise.outcome import AttemptOutcome
    from headway.agent.supervise.supervisor import supervise_run

__all__ = [
    "Attempt",
    "AttemptOutcome",
    "new_run",
    "recipe_of_ref",
    "resume_run",
    "run_launcher",
    "stated_recipe",
    "supervise_run",
]

_DEFINED_IN = {
    "Attempt": "attempt",
    "AttemptOutcome": "supervise.outcome",
    "new_run": "launch.prepare",
    "recipe_of_ref": "launch.branch",
    "resume_run": "launch.prepare",
    "run_launcher": "launch.launcher",
    "stated_recipe": "launch.branch",
    "supervise_run": "supervise.supervisor",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: verbs that only look at a run, or queue a command, need no launcher or supervisor."""
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
