"""Losses that are no numbers, and losses far above those before them."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.recipe.assignment import SpikeReference
from headway.recipe.schema import Health
from headway.track import RunFolder, runs_root
from headway.train.numerics import BadNumbers, BadStep, NumericsMonitor


def feed(watch: NumericsMonitor, losses: list[float], first: int = 1) -> list[BadStep | None]:
    return [watch.look(first + i, loss, 1.0) for i, loss in enumerate(losses)]


def test_spike_by_hand() -> None:
    """Median 3, deviations 2 1 0 1 2: their median is 1. Two of 1.4826 above 3 is 5.9652."""
    for loss, bad in ((5.965, False), (5.966, True), (1e9, True)):
        watch = NumericsMonitor(Health(spike_z=2, spike_window=5))
        assert feed(watch, [5, 1, 3, 2, 4]) == [None] * 5
        verdict = watch.look(6, loss, 1.0)
        assert (verdict is not None) == bad
        if verdict is not None:
            assert (verdict.kind, verdict.step, verdict.value, verdict.what) == ("spike", 6, loss, "loss")
            assert (verdict.usual, verdict.spread) == (3, pytest.approx(1.4826, rel=1e-9))
            assert verdict.z == pytest.approx((loss - 3) / 1.4826)


def test_median_of_even_window_is_between_two() -> None:
    """Median 2.5, deviations 1.5 0.5 0.5 1.5: in the middle 1. At z = 10 the line is 2.5 + 14.826."""
    for loss, bad in ((17.32, False), (17.33, True)):
        watch = NumericsMonitor(Health(spike_z=10, spike_window=4))
        feed(watch, [1, 2, 3, 4])
        assert (watch.look(5, loss, 1.0) is not None) == bad


def test_flat_loss_may_vary_by_one_percent() -> None:
    """A spread of 1 % of 2, or of -2; fifty of them are 1."""
    for usual in (2.0, -2.0):
        for loss, bad in ((usual + 0.999, False), (usual + 1.001, True)):
            watch = NumericsMonitor(Health(spike_z=50, spike_window=3))
            feed(watch, [usual] * 3)
            verdict = watch.look(4, loss, 1.0)
            assert (verdict is not None) == bad
            assert verdict is None or verdict.spread == pytest.approx(0.02)


def test_loss_exactly_at_threshold_is_no_spike() -> None:
    watch = NumericsMonitor(Health(spike_z=4, spike_window=1))
    feed(watch, [100.0])
    assert watch.look(2, 104.0, 1.0) is None


def test_falling_loss_is_no_spike() -> None:
    watch = NumericsMonitor(Health(spike_z=1, spike_window=4))
    assert feed(watch, [9.0, 9.1, 9.2, 9.3, -1e6, 0.0, 1e-9]) == [None] * 7


def test_detection_needs_a_full_window() -> None:
    for before in range(1, 9):
        watch = NumericsMonitor(Health(spike_z=3, spike_window=6))
        feed(watch, [1.0] * before)
        assert (watch.look(before + 1, 1000.0, 1.0) is not None) == (before >= 6)


def test_only_losses_in_the_window_count() -> None:
    """Five losses around 100, then five around 1: 50 is usual to the first and not to the second."""
    high, low = [100.0, 101.0, 99.0, 102.0, 98.0], [1.0, 1.1, 0.9, 1.2, 0.8]
    for taken in range(6):
        watch = NumericsMonitor(Health(spike_z=5, spike_window=5))
        assert feed(watch, high + low[:taken]) == [None] * (5 + taken)
        window = (high + low[:taken])[-5:]
        middle = statistics.median(window)
        line = middle + 5 * max(1.4826 * statistics.median(abs(x - middle) for x in window), middle / 100)
        assert watch.look(20, line - 0.01, 1.0) is None
        watch = NumericsMonitor(Health(spike_z=5, spike_window=5))
        feed(watch, high + low[:taken])
        assert watch.look(20, line + 0.01, 1.0) is not None


@given(
    st.integers(1, 7),
    st.sampled_from([0.5, 1.0, 3.0, 50.0]),
    st.lists(st.floats(-100, 100) | st.integers(0, 3).map(float), max_size=40),
)
def test_every_verdict_matches_the_definition(window: int, z: float, losses: list[float]) -> None:
    watch, fine = NumericsMonitor(Health(spike_z=z, spike_window=window)), list[float]()
    for step, loss in enumerate(losses, 1):
        verdict = watch.look(step, loss, 1.0)
        last = fine[-window:]
        if len(last) < window:
            assert verdict is None
        else:
            middle = statistics.median(last)
            spread = max(1.4826 * statistics.median(abs(x - middle) for x in last), abs(middle) / 100)
            above = loss - middle - z * spread
            if abs(above) > 1e-9 * (1 + abs(loss) + z * spread):
                assert (verdict is not None) == (above > 0)
            if verdict is not None:
                assert (verdict.usual, verdict.spread) == pytest.approx((middle, spread), rel=1e-9, abs=1e-12)
        if verdict is None:
            fine.append(loss)  # a spike is no part of what later ones are held against


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_detected_immediately(value: float) -> None:
    for health in (Health(), Health(spike_z=0)):
        loss = NumericsMonitor(health, accept=[1]).look(1, value, 1.0)
        assert loss is not None
        assert (loss.kind, loss.step, loss.what, loss.usual, loss.spread) == ("not finite", 1, "loss", 0.0, 0.0)
        assert loss.value is value
        norm = NumericsMonitor(health).look(1, 1.0, value)
        assert norm is not None
        assert (norm.kind, norm.what, norm.value) == ("not finite", "gradient norm", value)


def test_zero_threshold_disables_spike_detection() -> None:
    watch = NumericsMonitor(Health(spike_z=0, spike_window=1), judge=SpikeReference(step=3, usual=1.0, spread=0.1))
    assert feed(watch, [1.0, 1e9, 1e9]) == [None] * 3


def test_replayed_step_is_compared_with_its_reference() -> None:
    """In an attempt that has just begun, and in one whose own window would say something else."""
    judge = SpikeReference(step=3, usual=2.0, spread=0.5)
    for before in ([2.0, 2.0], [9e9, 9e9]):
        for loss, bad in ((-1e9, False), (3.9, False), (4.0, False), (4.1, True)):
            watch = NumericsMonitor(Health(spike_z=4, spike_window=2), judge=judge)
            assert feed(watch, before) == [None, None]
            verdict = watch.look(3, loss, 1.0)
            assert (verdict is not None) == bad
            assert verdict is None or (verdict.usual, verdict.spread) == (2.0, 0.5)
    other = NumericsMonitor(Health(spike_z=4, spike_window=2), judge=judge)
    assert feed(other, [2.0, 2.0, 2.0, 100.0])[-1] is not None  # the step after is held against its own window
    assert NumericsMonitor(Health(spike_window=64), judge=judge).look(4, 100.0, 1.0) is None


def test_accepted_spike_starts_a_new_window() -> None:
    """A level that has risen for good must not be a spike at every step."""
    watch = NumericsMonitor(Health(spike_z=4, spike_window=3), accept=(4,))
    assert feed(watch, [1.0, 1.0, 1.0, 50.0, 51.0, 50.0, 49.0, 52.0]) == [None] * 8
    assert watch.look(9, 80.0, 1.0) is not None
    late = NumericsMonitor(Health(spike_z=4, spike_window=3), accept=(4,))
    assert feed(late, [1.0, 1.0, 1.0])[-1] is None
    assert late.look(5, 50.0, 1.0) is not None  # another step's is not


def test_any_rise_of_a_constant_zero_loss_is_a_spike() -> None:
    watch = NumericsMonitor(Health(spike_window=2))
    assert feed(watch, [0.0, 0.0, 0.0]) == [None] * 3
    verdict = watch.look(4, 1e-3, 1.0)
    assert verdict is not None
    assert verdict.z == math.inf


def test_recorded_error_fields() -> None:
    run = RunFolder(runs_root() / "r")
    spike = BadNumbers(BadStep("spike", 12, 9.0, usual=3.0, spread=0.5), cursor=88, batch=8, run=run)
    assert spike.message == "the loss of step 12 is 9, far above the usual 3 (z = 12)"
    assert spike.facts == {
        "trouble": "spike", "step": 12, "value": 9.0, "usual": 3.0, "spread": 0.5, "window": (88, 96)
    }  # fmt: skip
    assert (spike.kind, spike.step, spike.cursor) == ("spike", 12, 88)
    assert (spike.hint or "").startswith("headway resume r --set health.if_spike=skip skips its samples")
    nan = BadNumbers(BadStep("not finite", 7, math.nan, "gradient norm"), cursor=0, batch=8, run=run)
    assert nan.message == "the gradient norm of step 7 is nan"
    assert (nan.hint or "").startswith("headway resume r --set health.if_not_finite=skip skips its samples")
