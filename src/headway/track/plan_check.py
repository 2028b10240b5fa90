"""A run's plan beside what was measured."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from headway.track.events import Record
from headway.track.ledger import Ledger
from headway.track.metrics import history
from headway.track.plans import RunPlan


class PlanCheck(NamedTuple):
    """A run's plan and what its steps took."""

    plan: RunPlan
    steps: int
    """Counted steps that the plan applies to."""
    measured_s: float | None
    """Their median: the first steps of an attempt are slower, which a plan does not model."""

    @property
    def off(self) -> float | None:
        """Relative error: how much longer the measured step is than the planned one."""
        return None if self.measured_s is None else self.measured_s / self.plan.step_s - 1


def check_plan(plan: RunPlan | None, records: Sequence[Record]) -> PlanCheck | None:
    """Return the plan with the measured time of the steps it applies to."""
    if plan is None:
        return None
    steps = [event for event in history(records) if event["step"] > plan.from_step]
    pairs = [(event.get("data"), event.get("compute")) for event in steps]
    times = [data + compute for data, compute in pairs if isinstance(data, int) and isinstance(compute, int)]
    return PlanCheck(plan, len(steps), statistics.median(times) / 1e9 if times else None)


def planned_shares(check: PlanCheck | None, ledger: Ledger) -> dict[str, float]:
    """Return the planned share of the allocation per account; a plan only models steps.

    Empty if the plan applies to some steps only: the allocation is that of all steps.
    """
    if check is None or check.plan.from_step or not check.steps or not ledger.total_ns:
        return {}
    device_ns = check.steps * check.plan.step_s * check.plan.devices * 1e9
    return {"compute": device_ns / ledger.total_ns, "data stall": 0.0}
