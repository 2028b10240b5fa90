"""Fault plans."""

import pytest
from pydantic import ValidationError

from headway.recipe import FaultPlan


def test_a_plan_strikes_where_it_says_and_travels_as_json() -> None:
    plan = FaultPlan().kill(step=3, rank=1).stall("data", step=5, seconds=2.0)
    again = FaultPlan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert [fault.action for fault in again.due("start", 3, 1, 1)] == ["kill"]
    assert again.due("start", 3, 0, 1) == []
    assert again.due("start", 3, 1, 2) == [], "a resumed run is not struck again"
    assert [fault.seconds for rank in (0, 1) for fault in again.due("data", 5, rank, 1)] == [2.0, 2.0]


def test_mutations_travel_with_a_plan_and_unknown_ones_are_refused() -> None:
    plan = FaultPlan.model_validate_json('{"mutations": ["whole-norm", "no-gradient-reduction"]}')
    assert plan.mutations == ("whole-norm", "no-gradient-reduction")
    assert plan.kill(step=1).mutations == plan.mutations, "a fault more leaves them as they are"
    assert FaultPlan().mutations == ()
    with pytest.raises(ValidationError, match="no-such-mistake"):
        FaultPlan.model_validate({"mutations": ["no-such-mistake"]})
