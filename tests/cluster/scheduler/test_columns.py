"""Columns against a dict of dicts."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.scheduler.columns import Columns
from thinned import examples

KINDS = {"size": (np.int32, 7), "late": (np.float64, math.inf), "there": (np.bool_, False)}
EMPTY = {"size": 7, "late": math.inf, "there": False}

values = st.fixed_dictionaries(
    {},
    optional={"size": st.integers(-100, 100), "late": st.floats(-1e9, 1e9), "there": st.booleans()},
)
steps = st.lists(st.one_of(st.tuples(st.just("add"), values), st.tuples(st.just("drop"), st.integers(0, 99))))


@settings(max_examples=examples(150), deadline=None)
@given(steps, st.integers(0, 3))
def test_rows_keep_their_numbers_and_values_while_others_come_and_go(steps, room):
    columns, model, row_of = Columns(KINDS, room), dict[str, dict[str, object]](), dict[str, int]()
    for number, (step, what) in enumerate(steps):
        if step == "add":
            name = f"row-{number}"
            row_of[name] = columns.add(name, **what)
            model[name] = EMPTY | what
        elif model:
            name = sorted(model)[what % len(model)]
            columns.drop(row_of.pop(name))
            del model[name]
        assert len(columns) == len(model)
        assert columns.rows == row_of
        assert len(set(row_of.values())) == len(row_of), "two names share a row"
        for name, row in row_of.items():
            assert columns.record(row) == {"name": name} | model[name]


def test_a_row_that_comes_again_has_nothing_of_the_one_before():
    columns = Columns(KINDS)
    row = columns.add("old", size=1, late=2.0, there=True)
    columns.drop(row)
    assert columns.add("new") == row
    assert columns.record(row) == {"name": "new"} | EMPTY


def test_freed_rows_come_again_before_the_table_grows():
    columns = Columns(KINDS, room=2)
    for number in range(1000):
        columns.drop(columns.add(f"row-{number}"))
    assert len(columns.names) == 1
    assert len(columns.size) == 2


def test_arrays_hold_many_rows_in_order():
    columns = Columns(KINDS, room=1)
    for number in range(100):
        assert columns.add(str(number), size=number) == number
    assert columns.size[:100].tolist() == list(range(100))
    assert columns.size.dtype == np.int32


def test_records_are_plain_values():
    columns = Columns(KINDS)
    rows = [columns.add("a", size=np.int64(3), late=np.float32(0.5), there=np.True_), columns.add("b")]
    found = columns.records(rows)
    assert found == [{"name": "a", "size": 3, "late": 0.5, "there": True}, {"name": "b"} | EMPTY]
    assert {type(value) for value in found[0].values()} == {str, int, float, bool}
    json.dumps(found)


def test_a_name_is_given_once():
    columns = Columns(KINDS)
    columns.add("a")
    with pytest.raises(AssertionError, match="a is there already"):
        columns.add("a")
