"""Tables of columns against a dict of dicts."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.scheduler.columns import Columns, column
from thinned import examples

DEFAULTS = {"size": 7, "late": math.inf, "ready": False}


class Table(Columns):
    size = column(np.int32, 7)
    late = column(np.float64, math.inf)
    ready = column(np.bool_, False)


values = st.fixed_dictionaries(
    {},
    optional={"size": st.integers(-100, 100), "late": st.floats(-1e9, 1e9), "ready": st.booleans()},
)
steps = st.lists(st.one_of(st.tuples(st.just("add"), values), st.tuples(st.just("drop"), st.integers(0, 99))))


@settings(max_examples=examples(150), deadline=None)
@given(steps, st.integers(0, 3))
def test_rows_keep_numbers_and_values_while_others_are_added_and_dropped(steps, capacity):
    columns, model, row_of = Table(capacity), dict[str, dict[str, object]](), dict[str, int]()
    for number, (step, what) in enumerate(steps):
        if step == "add":
            name = f"row-{number}"
            row_of[name] = columns.add(name, **what)
            model[name] = DEFAULTS | what
        elif model:
            name = sorted(model)[what % len(model)]
            columns.drop(row_of.pop(name))
            del model[name]
        assert len(columns) == len(model)
        assert columns.rows == row_of
        assert len(set(row_of.values())) == len(row_of), "two names share a row"
        for name, row in row_of.items():
            assert columns.record(row) == {"name": name} | model[name]


def test_reused_row_has_default_values():
    columns = Table()
    row = columns.add("old", size=1, late=2.0, ready=True)
    columns.drop(row)
    assert columns.add("new") == row
    assert columns.record(row) == {"name": "new"} | DEFAULTS


def test_freed_rows_are_reused_before_the_table_grows():
    columns = Table(capacity=2)
    for number in range(1000):
        columns.drop(columns.add(f"row-{number}"))
    assert len(columns.names) == 1
    assert len(columns.size) == 2


def test_table_grows_and_keeps_rows_in_order():
    columns = Table(capacity=1)
    for number in range(100):
        assert columns.add(str(number), size=number) == number
    assert columns.size[:100].tolist() == list(range(100))
    assert columns.size.dtype == np.int32


def test_records_are_plain_values():
    columns = Table()
    rows = [columns.add("a", size=np.int64(3), late=np.float32(0.5), ready=np.True_), columns.add("b")]
    records = [columns.record(row) for row in rows]
    assert records == [{"name": "a", "size": 3, "late": 0.5, "ready": True}, {"name": "b"} | DEFAULTS]
    assert {type(value) for value in records[0].values()} == {str, int, float, bool}
    json.dumps(records)


def test_duplicate_name_is_rejected():
    columns = Table()
    columns.add("a")
    with pytest.raises(AssertionError, match="a exists"):
        columns.add("a")
