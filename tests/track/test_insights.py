"""What stands out in records that were made to have it, and nothing in those that were not."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.track import Header, Record, RunPlan
from headway.track.insights import Insight, PreviousRun, find_insights
from thinned import examples


def records(losses: list[float | None], *, step_s: float = 1.0, agent: list[dict] | None = None) -> list[Record]:
    events = [
        {
            "kind": "step", "t": 0, "step": step, "loss": loss, "data": 0, "compute": int(step_s * 1e9), "tokens": 1000,
            "cursor": 8 * step,
        }
        for step, loss in enumerate(losses, 1)
    ]  # fmt: skip
    return [Record(Header(1, "rank-0"), events), Record(Header(1, "agent"), agent or [])]


def noisy(seed: int, count: int) -> list[float]:
    """A loss that falls, with noise of any batch."""
    rng = random.Random(seed)
    return [2 + 6 / (1 + step / 40) + rng.gauss(0, 0.05) for step in range(count)]


def kinds(insights: list[Insight]) -> list[str]:
    return [insight.kind for insight in insights]


def plan(**changes: object) -> RunPlan:
    plain = RunPlan(
        cluster="h100x2x1", chip="h100", assumed=False, fidelity="default", mesh={}, seq=10, batch=10, microbatch=5,
        recompute="none", precision="bf16", chosen={}, step_s=1.0, accounts_s={}, tokens_s=1000.0, mfu=0.5,
        mfu_full_attention=0.6, memory_bytes={"weights": 60 * 2**30}, capacity_bytes=80 * 2**30,
    )  # fmt: skip
    return plain.model_copy(update=changes)


@given(st.integers(0, 10**6), st.integers(0, 400), st.lists(st.integers(40, 390), max_size=3, unique=True))
@settings(max_examples=examples(12), deadline=None)
def test_spikes_are_those_that_were_put_in(seed, count, places):
    losses: list[float | None] = list(noisy(seed, count))
    places = sorted(step for step in places if step + 1 < count)
    for step in places:
        losses[step - 1] = losses[step - 1] + 4  # type: ignore[operator]
    found = find_insights(records(losses))
    assert sorted(insight.step for insight in found) == places
    for insight in found:
        assert insight.evidence["samples"] == [8 * (insight.step - 1), 8 * insight.step - 1]
        assert f"step {insight.step:,}: " in insight.text


def test_many_spikes_are_summed_up_and_rises_are_not_spikes():
    losses: list[float | None] = [2.0] * 400
    for number, step in enumerate((50, 120, 190, 260, 330)):
        losses[step - 1] = 10.0 + number
    found = find_insights(records(losses))
    assert [insight.step for insight in found] == [330, 260, 190, None]
    assert found[-1].evidence == {"steps": [50, 120]}
    assert kinds(find_insights(records([2.0] * 60 + [9.0] * 200))) == ["divergence"]
    assert find_insights(records([2.0] * 60 + [3.0])) == [], "the last step may be a rise"
    assert find_insights(records([None, 1.0] * 50)) == []
    assert find_insights([]) == []


def test_speed_is_compared_with_plan_and_previous_run():
    assert kinds(find_insights(records([2.0] * 20, step_s=1.05), plan(), PreviousRun("a", 1000.0))) == []
    found = find_insights(records([2.0] * 20, step_s=1.5), plan(), PreviousRun("a", 1000.0))
    assert kinds(found) == ["below plan", "below previous"]
    assert "steps take 1.5 s, 50% longer than the 1 s of the plan" in found[0].text
    assert "667 tokens/s, 33% less than a of the same recipe (1,000)" in found[1].text
    assert find_insights(records([2.0] * 20, step_s=1.5), plan(assumed=True)) == []
    assert kinds(find_insights(records([]), plan(), PreviousRun("a", 1000.0))) == []


def test_stragglers_and_unused_memory():
    events = [
        {"kind": "straggler", "t": 1, "rank": 3, "share": share, "what": "data", "text": "x"} for share in (0.1, 0.4)
    ]
    found = find_insights(records([2.0], agent=events), plan(memory_bytes={"weights": 2.0**30}))
    assert kinds(found) == ["straggler", "unused memory"]
    assert found[0].text == "worker 3 was last step after step 2 times (data); the others wait 40% of a step"
    assert "uses 1 of 80 GB" in found[1].text


@pytest.mark.parametrize("damaged", [{"loss": "x"}, {"cursor": None}, {"data": None}, {"loss": 1e999}, {"tokens": []}])
def test_damaged_fields_are_left_out(damaged):
    steps = records([2.0] * 50)
    steps[0].events[30].update(damaged)
    assert find_insights(steps, plan(), PreviousRun("a", 1000.0)) == []
