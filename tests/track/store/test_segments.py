"""Segments say what their lines say, however regular or damaged these are."""

import json
import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.track.store.segments import parse_segment

VALUES = st.one_of(
    st.floats(-1e6, 1e6), st.integers(-9, 9), st.none(), st.booleans(), st.just("text"), st.just(10**400),
    st.just(10**200), st.just([1.0]),
)  # fmt: skip
PLAIN = st.one_of(st.floats(-1e6, 1e6), st.integers(-9, 9))


@st.composite
def records(draw: st.DrawFn) -> list[bytes]:
    """Stretches of steps with the same fields, a few odd values and damaged lines among them."""
    lines = list[bytes]()
    for _ in range(draw(st.integers(1, 4))):
        keys = draw(st.lists(st.sampled_from(["loss", "lr", "data", "compute", "tokens", "norm"]), unique=True))
        odd = draw(st.integers(0, 30))
        extra = draw(
            st.sampled_from([{}, {"chain": "0a"}, {"gap": None}, {"flag": True}, {"chain": "0a", "gap": None}])
        )
        first = draw(st.integers(0, 20))
        for number in range(draw(st.integers(1, 20))):
            event = {"kind": "step", "step": first + number} | extra
            lines.append(json.dumps(event | {key: draw(VALUES if number == odd else PLAIN) for key in keys}).encode())
        lines.append(draw(st.sampled_from([b"", b"{", b'{"a":1},{"b":2}', b"null", b'{"kind":"step","step":1'])))
    return lines


def number(value: Any) -> float | None:
    """A field as metrics take it, said again: null is a gap, and what is no number is left out."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


@given(records())
def test_metrics_of_a_range_are_those_of_its_lines(lines: list[bytes]) -> None:
    want: dict[str, dict[int, float]] = {}
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or event.get("kind") != "step":
            continue
        for key in ("loss", "lr", "norm", "tokens", "chain", "gap", "flag"):
            if key in event and (value := number(event[key])) is not None:
                want.setdefault(key, {})[event["step"]] = value
        data, compute, tokens = (number(event.get(key, "")) for key in ("data", "compute", "tokens"))
        if data is not None and math.isfinite(data):
            want.setdefault("data_s", {})[event["step"]] = data / 1e9
            if compute is not None and math.isfinite(compute):
                seconds = (data + compute) / 1e9
                want.setdefault("step_s", {})[event["step"]] = seconds
                if tokens is not None and math.isfinite(tokens) and seconds:
                    want.setdefault("tokens_per_s", {})[event["step"]] = tokens / seconds
    found = parse_segment(b"".join(line + b"\n" for line in lines), {"kind": "open", "format": 1}).series
    assert set(want) == set(found)
    for key, values in want.items():
        steps, got = found[key]
        assert steps.tolist() == sorted(values)
        np.testing.assert_array_equal(got, [values[step] for step in sorted(values)])
