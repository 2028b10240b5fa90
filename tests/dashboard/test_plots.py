"""Plots show what every step did, at every zoom."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_plots import unpack

from headway.dashboard.series import overlay, packed
from headway.track.store.pyramid import single_steps, to_view


def view_of(run: str, steps: list[int], values: list[float], points: int):
    return to_view(run, "loss", single_steps(np.array(steps, np.int64), np.array(values, np.float64)), points)


SERIES = st.dictionaries(
    st.integers(1, 400), st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=300
)


@given(st.lists(SERIES, min_size=1, max_size=4), st.integers(5, 60))
def test_lines_have_the_extremes_and_nothing_beyond(series: list[dict[int, float]], points: int) -> None:
    views = [
        view_of(str(number), sorted(values), [values[step] for step in sorted(values)], points)
        for number, values in enumerate(series)
    ]
    plot = overlay(views)
    assert all(a <= b for a, b in zip(plot.steps.tolist(), plot.steps.tolist()[1:], strict=False))
    for number, values in enumerate(series):
        finite = [value for value in values.values() if not math.isnan(value)]
        line = plot.lines[str(number)]
        assert line.shape == plot.steps.shape
        drawn = line[np.isfinite(line)].tolist()
        assert bool(drawn) == bool(finite)
        if finite:
            assert (min(drawn), max(drawn)) == (min(finite), max(finite))
            assert set(drawn) <= set(finite)


@pytest.mark.parametrize("at", [1, 777, 5000, 9999, 10000])
def test_spike_of_one_step_is_seen_where_it_was(at: int) -> None:
    values = [1.0] * 10_000
    values[at - 1] = 9.0
    plot = overlay([view_of("a", list(range(1, 10_001)), values, 200)])
    assert plot.steps.size <= 400
    place = int(np.nanargmax(plot.lines["a"]))
    assert plot.lines["a"][place] == 9.0
    assert abs(int(plot.steps[place]) - at) <= 10_000 / 200 * 2
    assert plot.means is not None
    assert np.nanmax(plot.means["a"]) < 2.0


def test_runs_of_other_lengths_share_their_steps() -> None:
    long = view_of("long", list(range(1, 2001)), [float(step) for step in range(1, 2001)], 100)
    short = view_of("short", list(range(1, 101)), [5.0] * 100, 100)
    plot = overlay([long, short, view_of("none", [], [], 100)])
    assert set(plot.lines) == {"long", "short"}
    shown = plot.steps[np.isfinite(plot.lines["short"])]
    assert shown.min() <= 20
    assert shown.max() <= 120


@given(SERIES, st.integers(5, 400), st.sampled_from([1.0, 1e-200, 1e200]))
def test_sent_numbers_have_six_digits(values: dict[int, float], points: int, scale: float) -> None:
    series = [values[step] * scale for step in sorted(values)]
    plot = overlay([view_of("a", sorted(values), series, points)])
    sent = unpack(packed({"loss": plot, "lr": plot}, ["b"]))
    assert sent["pending"] == ["b"]
    for read in (sent["plots"]["loss"], sent["plots"]["lr"]):
        assert read["steps"] == plot.steps.tolist()
        columns = [(read["lines"]["a"], plot.lines["a"])] if "a" in plot.lines else []
        assert (read["means"] is None) == (plot.means is None)
        columns += [] if plot.means is None else [(read["means"]["a"], plot.means["a"])]
        for got, want in columns:
            for short, value in zip(got, want.tolist(), strict=True):
                assert short is None if math.isnan(value) else short == pytest.approx(value, rel=1e-6)
