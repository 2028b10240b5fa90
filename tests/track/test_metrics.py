"""Metrics across attempts, against a history replayed step by step."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import UsageError
from headway.track import (
    Header,
    Record,
    Recorder,
    RunFolder,
    create_run,
    history,
    metric_names,
    read_metric,
    read_metrics,
    record_path,
)
from thinned import examples


def write(run: RunFolder, attempt: int, process: str, events: list[tuple[str, dict]]) -> None:
    with Recorder(record_path(run.events, attempt, process), attempt=attempt, process=process) as recorder:
        for kind, fields in events:
            recorder.event(kind, **fields)


def step(number: int, loss: float, **fields: object) -> tuple[str, dict]:
    return "step", {"step": number, "data": 250_000_000, "compute": 750_000_000, "loss": loss, "tokens": 100, **fields}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """Attempt 1 did steps 1-4 and evaluated at 2 and 4; attempt 2 went back to 2 and has redone only step 3."""
    run = create_run(tmp_path, "demo")
    facts = ("facts", {"flops_per_token": 60, "peak_flops": 1500.0})
    write(run, 1, "agent", [("attempt", {"workers": 2})])
    write(
        run,
        1,
        "rank-0",
        [
            facts,
            ("resumed", {"step": 0}),
            step(1, 5.0),
            step(2, 4.0, chain="ab"),
            ("eval", {"step": 2, "loss": 4.5, "accuracy": 0.75, "losses": {"a": 4.5}}),
            step(3, 3.0),
            step(4, 2.0),
            ("eval", {"step": 4, "loss": 3.5}),
        ],
    )
    write(run, 1, "rank-1", [("step", {"step": 1, "data": 1, "compute": 1})])
    write(run, 2, "agent", [("attempt", {"workers": 4})])
    write(run, 2, "rank-0", [facts, ("resumed", {"step": 2}), step(3, math.nan, extra=1)])
    return run


def test_later_attempts_override_and_roll_back_steps(run):
    steps, values = read_metric(run, "loss")
    assert steps.dtype == np.int64
    assert steps.tolist() == [1, 2, 3]
    assert values[:2].tolist() == [5.0, 4.0]
    assert math.isnan(values[2])
    assert [part.tolist() for part in read_metric(run, "eval_accuracy")] == [[2], [0.75]]
    assert "eval_losses" not in metric_names(run)
    steps, values = read_metric(run, "eval_loss")
    assert (steps.tolist(), values.tolist()) == ([2], [4.5])


def test_derived_metrics(run):
    assert read_metric(run, "step_s")[1].tolist() == [1.0] * 3
    assert read_metric(run, "data_s")[1].tolist() == [0.25] * 3
    assert read_metric(run, "tokens_per_s")[1].tolist() == [100.0] * 3
    # 100 tokens/s x 60 FLOPs over 2 x 1500 FLOP/s, then over 4 x 1500.
    assert read_metric(run, "mfu")[1].tolist() == [2.0, 2.0, 1.0]
    assert read_metric(run, "extra")[0].tolist() == [3]


def test_unknown_metric_lists_recorded_ones(run):
    for key in ("lost", "chain", "kind"):
        with pytest.raises(UsageError, match=f"no metric '{key}'") as caught:
            read_metric(run, key)
        assert "loss, tokens, extra, step_s, data_s, tokens_per_s, mfu, eval_loss, eval_accuracy" in (
            caught.value.hint or ""
        )
    assert metric_names(run) == list(read_metrics(run))


def test_no_mfu_without_peak_flops(tmp_path):
    run = create_run(tmp_path, "demo")
    write(run, 1, "rank-0", [("facts", {"flops_per_token": 60, "peak_flops": None}), step(1, 1.0)])
    assert "mfu" not in metric_names(run)
    empty = create_run(tmp_path, "demo")
    with pytest.raises(UsageError) as caught:
        read_metric(empty, "loss")
    assert "none yet" in (caught.value.hint or "")


attempts = st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 6)), st.integers(0, 5), st.booleans()), max_size=5)


@given(attempts)
@settings(max_examples=examples(200), deadline=None)
def test_history_matches_a_replay_of_events(plan):
    """Replay: each attempt first undoes what lies behind its start, then does its steps one after the other."""
    replayed: dict[int, tuple[int, int]] = {}
    records = []
    for number, (resumed, count, recorded) in enumerate(plan, 1):
        start = resumed if resumed is not None else 0
        events = []
        if resumed is not None and recorded:
            events.append({"kind": "resumed", "t": 0, "step": resumed})
            replayed = {at: value for at, value in replayed.items() if at <= resumed}
        for at in range(start + 1, start + count + 1):
            events.append({"kind": "step", "t": 0, "step": at, "who": (number, at)})
            replayed[at] = (number, at)
        records.append(Record(Header(number, "rank-0"), events))
        records.append(Record(Header(number, "rank-1"), [{"kind": "step", "t": 0, "step": 99}]))
    kept = history(records)
    assert {event["step"]: event["who"] for event in kept} == replayed
    assert [event["step"] for event in kept] == sorted(replayed)


plain = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**53), 2**53), st.none())
awkward = st.one_of(
    plain,
    st.booleans(),
    st.sampled_from(['"loss":1.0', "a\\", '{"loss":2}', "x,y}", "", {"loss": 3.0}, ["loss", 4.0], 10**400]),
    st.text(max_size=4),
)
alike = st.lists(st.tuples(st.integers(0, 50), plain), max_size=8)
mixed = st.lists(
    st.tuples(st.one_of(st.integers(0, 50), awkward), awkward)
    | st.sampled_from(['{"kind":"step","step":1,"loss":', "{}"]),
    max_size=8,
)


@given(rows=st.one_of(alike, mixed), note=st.one_of(st.none(), awkward))
@settings(max_examples=examples(200), deadline=None)
def test_scanned_numbers_match_parsed_json(tmp_path_factory, rows, note):
    run = create_run(tmp_path_factory.mktemp("runs"), "demo")
    extra = {} if note is None else {"note": note}
    lines = [
        row if isinstance(row, str) else json.dumps({"kind": "step", "t": 1, "step": row[0], "loss": row[1], **extra})
        for row in rows
    ]
    text = "".join(f"{line}\n" for line in lines).replace('"kind": "step", ', '"kind":"step",').replace('": ', '":')
    record_path(run.events, 1, "rank-0").write_text(text)
    want: dict[int, float] = {}
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        step, loss = event.get("step"), event.get("loss", "absent")
        if (
            type(step) is int
            and step < 2**63
            and (loss is None or type(loss) is float or (type(loss) is int and abs(loss) < 2**1000))
        ):
            want[step] = math.nan if loss is None else float(loss)
    steps, values = read_metrics(run, ["loss"]).get("loss", (np.empty(0), np.empty(0)))
    assert steps.tolist() == sorted(want)
    np.testing.assert_array_equal(values, [want[step] for step in sorted(want)])
