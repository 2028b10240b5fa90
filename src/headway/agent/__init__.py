"""The agent: one process per node that starts, watches and restarts the workers of a run."""

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
