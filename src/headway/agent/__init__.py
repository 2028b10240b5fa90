"""One a node: starts and watches the workers of a run."""

from headway.agent.attempt import Attempt
from headway.agent.keeper import keep
from headway.agent.outcome import Outcome
from headway.agent.prepare import new_run, recipe_behind, resolve, resume_run, stated_recipe
from headway.agent.supervise import supervise

__all__ = [
    "Attempt",
    "Outcome",
    "keep",
    "new_run",
    "recipe_behind",
    "resolve",
    "resume_run",
    "stated_recipe",
    "supervise",
]
