"""Callbacks of the user's own: what worker 0 tells them while it trains.

They see numbers, not weights, so that a run has the same bits with them and without.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.errors import ModelError
from headway.recipe import Recipe
from headway.recipe.own_code import describe_error, load_name
from headway.recipe.schema import OwnCallback
from headway.track.user_log import at_step

METHODS = ("begin", "step", "evaluated", "end")


class Callback:
    """What a callback may define; it need not derive from this class."""

    def begin(self, run: Path, recipe: Recipe, step: int) -> None:
        """Begin an attempt, with the step that it continues from."""

    def step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Take a recorded step with its metrics; return True to save and stop the run after the next."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the scores of held-out rows, or of tasks by `task/metric`."""

    def end(self, step: int) -> None:
        """End an attempt after its last step, whether the run is finished or stopped; not after a failure."""


class Callbacks:
    """The callbacks of a run, called in turn; an exception of one ends the run and names it."""

    def __init__(self, named: Sequence[tuple[str, Any]] = ()) -> None:
        self._named = tuple(named)

    @classmethod
    def of(cls, callbacks: Sequence[OwnCallback]) -> "Callbacks":
        """Import and construct the callbacks of a recipe."""
        return cls([(callback.class_, _constructed(callback)) for callback in callbacks])

    def begin(self, run: Path, recipe: Recipe, step: int) -> None:
        """Begin an attempt."""
        with at_step(step):
            self._call("begin", run, recipe, step)

    def step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Pass a step on; return whether a callback wants to stop."""
        with at_step(step):
            return True in self._call("step", step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass scores on."""
        with at_step(step):
            self._call("evaluated", step, metrics)

    def end(self, step: int) -> None:
        """End an attempt."""
        with at_step(step):
            self._call("end", step)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        answers = []
        for name, callback in self._named:
            call = getattr(callback, method, None)
            if call is None:
                continue
            try:
                answers.append(call(*arguments))
            except Exception as error:
                raise ModelError(f"callback {name} failed in {method}: {describe_error(error)}") from error
        return answers


def _constructed(callback: OwnCallback) -> Any:
    cls = load_name(callback.class_, "callbacks.class")
    try:
        built = cls(**callback.args)
    except Exception as error:
        raise ModelError(f"{callback.class_} cannot be built with its args: {describe_error(error)}") from error
    if not any(callable(getattr(built, method, None)) for method in METHODS):
        raise ModelError(f"{callback.class_} is no callback", hint=f"a callback has {', '.join(METHODS)}, or some")
    return built
