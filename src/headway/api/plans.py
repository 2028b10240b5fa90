"""`hw.plan`: the fastest way to run a recipe on a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.api import html
from headway.api.start import AnyRecipe, recipe_of
from headway.hardware import parse_on
from headway.plan.plan import Plan
from headway.plan.plan import plan as find_plan
from headway.track import runs_root


@dataclass(frozen=True)
class PlanSummary:
    """The best plan that was found, and what it takes."""

    recipe: str
    cluster: str
    plan: Plan
    """With runners-up and where a step's time goes; see `headway.plan`."""

    @property
    def mesh(self) -> str:
        """The mesh of workers."""
        return self.plan.best.estimate.settings.mesh.describe()

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.plan.best.estimate.step.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices."""
        return self.plan.best.estimate.tokens_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.plan.best.estimate.mfu

    @property
    def memory_bytes(self) -> float:
        """Peak memory per device."""
        return self.plan.best.estimate.memory.total

    @property
    def days(self) -> float:
        """Days of the whole run."""
        return self.plan.run.days

    @property
    def accounts(self) -> dict[str, float]:
        """Seconds of a step by account."""
        return dict(self.plan.best.estimate.step.accounts)

    def __repr__(self) -> str:
        speed = f"{self.step_s:.3g} s per step, MFU {self.mfu:.0%}, {self.memory_bytes / 1e9:.1f} GB, {self.days:.2g} d"
        return f"PlanSummary({self.recipe} on {self.cluster}: {self.mesh}, {speed})"

    def _repr_html_(self) -> str:
        rows = [(name, seconds, f"{seconds / self.step_s:.1%}") for name, seconds in self.accounts.items()]
        return html.table(("account", "s per step", "share"), rows, repr(self)[len("PlanSummary(") : -1])


def plan(
    recipe: AnyRecipe, on: str = "h100x8", *, set: Mapping[str, Any] | None = None, price: float | None = None
) -> PlanSummary:
    """Find the fastest plan of a recipe on devices such as h100x8x4: 4 nodes of 8; `price` is per GPU-hour."""
    loaded = recipe_of(recipe, set)
    if loaded.model.init is not None:
        from headway.agent.launch.resolve import resolve_model  # takes 0.35 s

        loaded = loaded.model_copy(update={"model": resolve_model(loaded.model, runs_root(None))})
    elif loaded.model.class_ is None and loaded.model.vocab_size is None:
        from headway.cli.model import with_vocabulary

        model, _ = with_vocabulary(loaded.model, Path(next(iter(loaded.data.parts.values())).path))
        loaded = loaded.model_copy(update={"model": model})
    cluster = parse_on(on)
    return PlanSummary(loaded.name, on, find_plan(loaded, cluster, price=price))
