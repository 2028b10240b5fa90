"""Series of the store against `read_metrics`, which parses every line, and against buckets computed one by one."""

import math
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventually import eventually
from headway.track import create_run, read_metrics, record_path
from headway.track.store import SeriesView, metric_keys, read_series
from headway.track.store.at_end import compact_in_background
from headway.track.store.compact import MetricStore
from headway.track.store.series import metric_statistics
from thinned import examples
from track_runs import line, plain_run, step_line, write_record


def buckets(steps: np.ndarray, values: np.ndarray, width: int) -> dict[str, list[float]]:
    """Buckets one by one."""
    table: dict[str, list[float]] = {"steps": [], "minimum": [], "maximum": [], "mean": [], "count": []}
    owned: dict[int, list[tuple[int, float]]] = {}
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        owned.setdefault(step // width, []).append((step, value))
    for _, inside in sorted(owned.items()):
        finite = [value for _, value in inside if math.isfinite(value)] or [math.nan]
        table["steps"].append(inside[0][0])
        table["minimum"].append(min(finite))
        table["maximum"].append(max(finite))
        table["mean"].append(math.fsum(finite) / len(finite))
        table["count"].append(sum(math.isfinite(value) for _, value in inside))
    return table


def agrees(view: SeriesView, steps: np.ndarray, values: np.ndarray) -> None:
    expected = buckets(steps, values, view.width)
    assert view.steps.tolist() == expected["steps"]
    assert view.count.tolist() == expected["count"]
    np.testing.assert_array_equal(view.minimum, expected["minimum"])
    np.testing.assert_array_equal(view.maximum, expected["maximum"])
    np.testing.assert_allclose(view.mean, expected["mean"], rtol=1e-12, atol=1e-300)


number = st.one_of(st.none(), st.floats(-1e6, 1e6), st.integers(-5, 5))
attempts = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 60)),  # resumed after this step, if it says so
        st.integers(0, 40),  # steps done
        st.lists(st.tuples(st.integers(0, 60), number), max_size=3),  # evaluations
        st.sampled_from(["", '{"kind":"step","step":', "not json\n", '{"kind":"step","step":true,"loss":1.0}\n']),
    ),
    min_size=1,
    max_size=4,
)


@given(attempts, st.integers(200, 3000), st.lists(number, min_size=1, max_size=7), st.integers(2, 50))
@settings(max_examples=examples(5), deadline=None)
def test_series_equal_those_of_all_lines(tmp_path_factory, plan, segment_bytes, values, points):
    """Any attempts, cut into segments anywhere: from memory, while it is compacted, and from Parquet."""
    run = create_run(tmp_path_factory.mktemp("runs"), "demo")
    for attempt, (resumed, count, evaluations, torn) in enumerate(plan, 1):
        start = resumed or 0
        body = line("facts", flops_per_token=60.0, peak_flops=1500.0 * attempt)
        body += line("resumed", step=resumed) if resumed is not None else ""
        for at in range(start + 1, start + count + 1):
            more = {"Loss": 1.5, "extra": at} if at % 7 == attempt else {}
            body += step_line(at, values[at % len(values)], **more)
        body += "".join(line("eval", step=at, loss=value) for at, value in evaluations)
        write_record(run, attempt, body + torn)
    expected = read_metrics(run)
    store = MetricStore(segment_bytes=segment_bytes, smallest_bytes=300)
    for reader in (store, store, MetricStore(segment_bytes=segment_bytes, smallest_bytes=300)):
        assert sorted(metric_keys(run, store=reader)) == sorted(expected)
        for key, (steps, numbers) in expected.items():
            view = read_series([run], key, store=reader)[0]
            np.testing.assert_array_equal(view.steps, steps)
            np.testing.assert_allclose(view.mean, numbers, rtol=1e-15)
        steps, numbers = expected.get("loss", (np.empty(0, np.int64), np.empty(0)))
        view = read_series([run], "loss", points=points, store=reader)[0]
        assert len(view.steps) <= points
        agrees(view, steps, numbers)
        inside = (steps >= 5) & (steps <= 30)
        agrees(
            read_series([run], "loss", first=5, last=30, points=points, store=reader)[0], steps[inside], numbers[inside]
        )
        stats = metric_statistics([run], store=reader)[0]
        for key, (_, numbers) in expected.items():
            finite = numbers[np.isfinite(numbers)]
            last = numbers[-1] if np.isfinite(numbers[-1]) else None
            assert (stats[key].last, stats[key].count) == (pytest.approx(last), len(finite))
            if len(finite):
                extremes = (stats[key].minimum, stats[key].maximum, stats[key].mean)
                assert extremes == pytest.approx((finite.min(), finite.max(), finite.mean()), rel=1e-9, abs=1e-9)


def test_spike_of_one_step_is_visible_at_every_zoom(tmp_path):
    losses = [2.0 + math.sin(step) / 10 for step in range(12_000)]
    losses[7_123], losses[4_000] = 99.0, float("nan")
    run = plain_run(tmp_path, losses)
    store = MetricStore(segment_bytes=1 << 19)
    steps, values = read_metrics(run, ["loss"])["loss"]
    for points in (2, 5, 117, 750, 751, 40_000):
        view = read_series([run], "loss", points=points, store=store)[0]
        assert view.maximum[np.searchsorted(view.steps, 7_124, side="right") - 1] == 99.0
        assert len(view.steps) <= points
        if points in (5, 117):
            agrees(view, steps, values)
    assert len(list(run.events.glob("*.levels.parquet"))) >= 2, "several segments with levels were read"
    for first, last in ((7_000, 7_200), (1, 11_999), (7_124, 7_124), (40_000, 50_000), (9, 3)):
        inside = (steps >= first) & (steps <= last)
        view = read_series([run], "loss", first=first, last=last, points=60, store=store)[0]
        agrees(view, steps[inside], values[inside])


def test_later_attempt_cuts_what_is_compacted(tmp_path):
    """Buckets of a level that a roll-back cuts are computed from their steps."""
    run = plain_run(tmp_path, [float(step) for step in range(8000)])
    store = MetricStore(smallest_bytes=1)
    read_series([run], "loss", points=10, store=store)
    write_record(run, 2, line("resumed", step=7001) + "".join(step_line(step, -1.0) for step in range(7002, 7010)))
    for reader in (store, MetricStore()):
        view = read_series([run], "loss", points=10, store=reader)[0]
        agrees(view, *read_metrics(run, ["loss"])["loss"])
        assert view.maximum.max() == 7000.0


@pytest.mark.parametrize("damage", ["empty", "half", "footer", "flip", "levels", "other", "text"])
def test_damaged_parquet_is_made_again(tmp_path, damage):
    run = plain_run(tmp_path, [float(step % 97) for step in range(4200)])
    read_series([run], "loss", store=MetricStore(smallest_bytes=1))
    (levels,) = run.events.glob("*.levels.parquet")
    (file,) = (path for path in run.events.glob("*.parquet") if path != levels)
    good = bytearray(file.read_bytes())
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "half":
        file.write_bytes(good[: len(good) // 2])
    elif damage == "footer":
        file.write_bytes(good[:-8] + b"\xff" * 4 + b"PAR1")
    elif damage == "flip":
        good[len(good) // 4] ^= 0x10
        file.write_bytes(good)
    elif damage == "levels":
        levels.write_bytes(levels.read_bytes()[:100])
    elif damage == "other":
        shutil.copy(levels, file)
    else:
        file.write_text("not Parquet")
    steps, values = read_metrics(run, ["loss"])["loss"]
    for points in (None, 20):
        agrees(read_series([run], "loss", points=points)[0], steps, values)
    store = MetricStore(smallest_bytes=1)
    assert store.compact(run) == 1
    agrees(read_series([run], "loss", points=20, store=store)[0], steps, values)


def test_compaction_is_idempotent_and_leaves_live_records_alone(tmp_path):
    run = plain_run(tmp_path, [1.0] * 500)
    store = MetricStore(smallest_bytes=1)
    assert store.compact(run) == 1
    before = {path: path.read_bytes() for path in run.events.iterdir()}
    assert (store.compact(run), MetricStore(smallest_bytes=1).compact(run)) == (1, 1)
    assert {path: path.read_bytes() for path in run.events.iterdir()} == before
    live = create_run(tmp_path, "demo", "live")
    path = write_record(live, 1, "".join(step_line(step, 1.0) for step in range(500)), ended=False)
    assert store.compact(live) == 0
    assert len(read_series([live], "loss", store=store)[0].steps) == 500
    with path.open("a") as file:
        file.write(step_line(500, 7.0) + '{"kind":"step"')
    assert read_series([live], "loss", store=store)[0].mean[-1] == 7.0


def test_record_that_was_replaced_is_read_again(tmp_path):
    """A store may overwrite the record of an attempt that was lost with another's of the same number."""
    run, other = plain_run(tmp_path, [1.0] * 300), plain_run(tmp_path, [2.0] * 300, "other")
    store = MetricStore(smallest_bytes=1)
    store.compact(run)
    record = record_path(run.events, 1, "rank-0")
    shutil.copy(record_path(other.events, 1, "rank-0"), record)
    for reader in (store, MetricStore()):
        assert read_series([run], "loss", store=reader)[0].maximum.tolist() == [2.0] * 300


def test_folders_that_cannot_be_written_or_vanish(tmp_path, monkeypatch):
    run, gone = plain_run(tmp_path, [1.0, 2.0]), plain_run(tmp_path, [1.0], "gone")
    store = MetricStore(smallest_bytes=1)
    monkeypatch.setattr("headway.track.store.parquet.make_durable", _refuse)
    assert read_series([run], "loss", store=store)[0].mean.tolist() == [1.0, 2.0]
    assert not list(run.events.glob("*.parquet*"))
    assert not list(run.events.glob(".*"))
    monkeypatch.undo()
    store.compact(gone)
    shutil.rmtree(gone.path)
    views = read_series([run, gone], "loss", store=store)
    assert [len(view.steps) for view in views] == [2, 0]
    assert metric_keys(gone, store=store) == []


def test_two_writers_and_a_reader_that_deletes_agree(tmp_path):
    """Threads with a store each compact the same record in small segments, while one removes what they wrote."""
    run = plain_run(tmp_path, [float(step % 7) for step in range(400)])
    expected, found, trouble = read_metrics(run, ["loss"])["loss"][1].tolist(), [], []

    def work(deletes: bool) -> None:
        try:
            for _ in range(3):
                store = MetricStore(segment_bytes=9000, smallest_bytes=1)
                found.append(read_series([run], "loss", store=store)[0].mean.tolist())
                for path in run.events.glob("*.parquet") if deletes else ():
                    path.unlink(missing_ok=True)
        except BaseException as error:
            trouble.append(error)

    threads = [threading.Thread(target=work, args=(deletes,)) for deletes in (False, False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not trouble
    assert all(values == expected for values in found)


def _refuse(path: Path) -> None:
    raise OSError(28, "No space left on device", str(path))


def test_run_that_ended_is_compacted_by_another_process(tmp_path, monkeypatch):
    run = plain_run(tmp_path, [1.0] * 700)
    assert not compact_in_background(run), "not worth a process"
    monkeypatch.setattr("headway.track.store.at_end.WORTH_BYTES", 1)
    assert compact_in_background(run)
    assert eventually(lambda: list(run.events.glob("*.parquet")))
    assert MetricStore().compact(run) == 1
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert not compact_in_background(run)


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    run = plain_run(tmp_path, [1.0])
    old, new = (run.events / f".0001-rank-0.0-9.parquet.{name}.partial" for name in ("0a", "0b"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    MetricStore().compact(run)
    assert (old.exists(), new.exists()) == (False, True)


def test_paths_that_look_like_patterns(tmp_path):
    root = tmp_path / "we[ir]d*=3 'x'"
    runs = [plain_run(root, [1.0, 2.0], "a"), plain_run(root, [3.0], "b")]
    store = MetricStore(smallest_bytes=1)
    for _ in range(2):
        assert [view.mean.tolist() for view in read_series(runs, "loss", store=store)] == [[1.0, 2.0], [3.0]]
    assert store.compact(runs[0]) == 1
