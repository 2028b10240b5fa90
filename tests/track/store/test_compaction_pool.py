"""Runs compacted by several processes: the same files and the same metrics as by one, whoever dies."""

import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from headway.track import RunFolder
from headway.track.store import MetricStore, compact, read_series
from headway.track.store.compaction_pool import CompactionPool
from track_runs import plain_run

STEPS = 800
"""Of about 130 bytes each: more than is kept as lines."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunFolder]:
    """Six runs that count as far behind."""
    monkeypatch.setattr(compact, "BEHIND_BYTES", 1000)
    return [plain_run(tmp_path, [run + 5 / step for step in range(1, STEPS + 1)], f"run-{run}") for run in range(6)]


def assert_compacted(runs: list[RunFolder]) -> None:
    for run, view in zip(runs, read_series(runs, "loss"), strict=True):
        np.testing.assert_array_equal(view.mean, [int(run.name[-1]) + 5 / step for step in range(1, STEPS + 1)])
    assert all(len(list(run.events.glob("*.parquet"))) == 1 for run in runs)


@pytest.mark.slow
def test_processes_leave_what_one_process_does(runs: list[RunFolder], tmp_path: Path) -> None:
    others = [RunFolder(tmp_path / "others" / run.name) for run in runs]
    for run, other in zip(runs, others, strict=True):
        shutil.copytree(run.path, other.path)
        MetricStore().compact(other)
    store = MetricStore()
    store._pool = CompactionPool(2)
    assert store.compact_some(runs, math.inf) == []
    assert not store._pool.busy
    assert_compacted(runs)
    for run, other in zip(runs, others, strict=True):
        (file,), (expected,) = run.events.glob("*.parquet"), other.events.glob("*.parquet")
        assert (file.name, file.read_bytes()) == (expected.name, expected.read_bytes())
    assert store.compact_some(runs, math.inf) == []


@pytest.mark.slow
def test_runs_of_a_process_that_dies_are_read_all_the_same(runs: list[RunFolder]) -> None:
    pool = CompactionPool(1)
    assert pool.assign(runs[0].path)
    assert not pool.assign(runs[1].path)
    (process,) = pool._processes
    os.kill(process.pid, signal.SIGKILL)
    assert pool.finished(60) == [runs[0].path]
    assert not pool.busy
    store = MetricStore()
    store._pool = pool
    assert store.compact_some(runs[1:], math.inf) == []
    assert_compacted(runs[1:])
    assert read_series(runs[:1], "loss")[0].count.sum() == STEPS


@pytest.mark.slow
def test_processes_end_with_the_pool(runs: list[RunFolder]) -> None:
    pool = CompactionPool(1)
    assert pool.assign(runs[0].path)
    (process,) = pool._processes
    pool.close()
    assert process.returncode == 0
    assert_compacted(runs[:1])


def test_an_answer_does_not_wait_for_all(runs: list[RunFolder]) -> None:
    store = MetricStore()
    store._pool = CompactionPool(0)
    left = store.compact_some(runs, 0.0)
    assert left == runs[1:], "one per call"
    assert store.compact_some(runs, math.inf) == []
    assert_compacted(runs)
