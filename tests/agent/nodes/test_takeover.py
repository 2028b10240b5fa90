"""The leader's machine is lost: another one leads, and the run ends bit for bit as an undisturbed one."""

import os
import re
import signal
import time

import pytest
from machines import make_machines

from conftest import Lived
from eventually import CEILING_S
from headway.agent.nodes.lease import newest_lease
from headway.track.suspects import read_suspects

SETTINGS = {
    "train.steps": 200,
    "train.restarts": 3,
    "checkpoint.every_steps": 100,
    "checkpoint.memory_every_steps": 1,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, make_lab, recipe) -> Lived:
    """An undisturbed run of two workers on one node."""
    lived = make_lab(tmp_path_factory.mktemp("reference")).train(recipe(SETTINGS), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    return lived


@pytest.mark.slow
def test_leader_is_lost(recipe, tmp_path, reference: Lived) -> None:
    """Three machines for two workers: the third replaces the first, the second leads."""
    with make_machines(recipe(SETTINGS), tmp_path, count=2, spares=1, workers=2) as cluster:
        for number in range(3):
            cluster.start(number)
        cluster.until(lambda: cluster.copied() > 20)
        cluster.lose(0)
        assert cluster.wait() == {1: 0, 2: 0}, cluster.output()
        cluster.assert_same_end(reference)
        (recovery,) = cluster.recoveries
        assert re.fullmatch(
            r"leader \S+-0 was lost; \S+-1 is the new leader; resuming from step \d+ \(memory\)", recovery
        )
        assert newest_lease(cluster.run.leases).number == 3  # one to lead, one for the attempt


@pytest.mark.slow
def test_leader_is_lost_and_one_machine_is_left(recipe, tmp_path) -> None:
    with make_machines(recipe(SETTINGS), tmp_path, count=2, spares=0, workers=2) as cluster:
        cluster.start(0)
        cluster.start(1)
        cluster.until(lambda: cluster.copied() > 20)
        cluster.lose(0)
        assert cluster.wait() == {1: 0}, cluster.output()
        assert [event["workers"] for event in cluster.events("attempt")] == [2, 1]
        (recovery,) = cluster.recoveries
        assert re.search(
            r"-1 is the new leader; resuming from step \d+ \(memory\), with one worker instead of 2$", recovery
        )


@pytest.mark.slow
def test_former_leader_steps_down_after_it_was_suspended(recipe, tmp_path, reference: Lived) -> None:
    """The leader's machine is suspended; when it continues another one leads, and it commits nothing."""
    with make_machines(recipe(SETTINGS), tmp_path, count=2, spares=1, workers=2) as cluster:
        for number in range(3):
            cluster.start(number)
        cluster.until(lambda: cluster.copied() > 20)
        frozen = cluster.processes_of(0)
        for process in frozen:
            process.suspend()
        cluster.until(lambda: cluster.recoveries)
        for process in frozen:
            process.resume()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.output()
        cluster.assert_same_end(reference)
        assert "another machine's agent leads this run now" in cluster.output()
        assert len(cluster.recoveries) == 1


@pytest.mark.slow
def test_machine_that_returns_gets_workers_again(recipe, tmp_path) -> None:
    """One of two machines is lost: one worker resumes, and two as soon as it is back."""
    with make_machines(recipe(SETTINGS), tmp_path, count=2, spares=0, workers=2) as cluster:
        cluster.start(0)
        cluster.start(1)
        cluster.until(lambda: cluster.copied() > 20)
        cluster.lose(1)
        cluster.until(lambda: len(cluster.events("attempt")) == 2)
        cluster.start(1)
        assert cluster.wait() == {0: 0, 1: 0}, cluster.output()
        assert [event["workers"] for event in cluster.events("attempt")] == [2, 1, 2]
        lost, room = cluster.recoveries
        assert re.search(r"with one worker instead of 2$", lost)
        assert re.fullmatch(
            r"there is room for 2 workers again; resuming from step \d+ \(memory\), with 2 .* of 1", room
        )


@pytest.mark.slow
def test_run_that_needs_all_workers_waits_for_the_machine(recipe, tmp_path, reference: Lived) -> None:
    with make_machines(
        recipe(SETTINGS | {"train.fewest_workers": 2}), tmp_path, count=2, spares=0, workers=2
    ) as cluster:
        cluster.start(0)
        cluster.start(1)
        cluster.until(lambda: cluster.copied() > 20)
        cluster.lose(1)
        cluster.until(lambda: cluster.recoveries)
        cluster.start(1)
        assert cluster.wait() == {0: 0, 1: 0}, cluster.output()
        cluster.assert_same_end(reference)
        (recovery,) = cluster.recoveries
        assert re.search(r"resuming from step \d+ \((memory|disk)\), once a replacement node joins$", recovery)


@pytest.mark.slow
def test_second_machine_is_lost_during_recovery(recipe, tmp_path, reference: Lived) -> None:
    with make_machines(recipe(SETTINGS), tmp_path, count=2, spares=2, workers=2) as cluster:
        for number in range(4):
            cluster.start(number)
        cluster.until(lambda: cluster.copied() > 20)
        cluster.lose(1)
        cluster.until(lambda: cluster.recoveries)
        cluster.lose(2)
        assert cluster.wait() == {0: 0, 3: 0}, cluster.output()
        cluster.assert_same_end(reference)


@pytest.mark.slow
def test_machine_whose_workers_die_twice_is_excluded_and_reported(recipe, tmp_path, reference) -> None:
    with make_machines(recipe(SETTINGS), tmp_path, count=2, spares=1, workers=2) as cluster:
        for number in range(3):
            cluster.start(number)
        cluster.until(lambda: cluster.copied() > 20)
        for attempt in (1, 2):
            cluster.until(lambda: len(cluster.events("worker")) == 2 * attempt)  # noqa: B023
            (pid,) = [event["pid"] for event in cluster.events("worker")[-2:] if event["rank"] == 1]
            os.kill(pid, signal.SIGKILL)
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.output()
        cluster.assert_same_end(reference)
        assert "without node" in cluster.recoveries[1]
        assert list(read_suspects(cluster.run.path, time.time())) == ["b"]
        assert "worker 1 was killed by signal 9" in cluster.run.suspects_file.read_text()


@pytest.mark.slow
def test_second_agent_of_a_machine_is_refused(recipe, tmp_path, reference: Lived) -> None:
    with make_machines(recipe(SETTINGS), tmp_path, count=2, spares=0, workers=2) as cluster:
        cluster.start(0)
        cluster.start(1)
        cluster.until(lambda: cluster.copied() > 5)
        first = cluster.processes.pop(1)
        cluster.start(1)
        assert cluster.processes.pop(1).wait(CEILING_S) == (1 if first.poll() is None else 0), cluster.output()
        cluster.processes[1] = first
        assert cluster.wait() == {0: 0, 1: 0}, cluster.output()
        cluster.assert_same_end(reference)
        assert cluster.recoveries == []
        cluster.start(1)  # of a finished run
        assert cluster.wait() == {0: 0, 1: 0}
        assert "has already finished" in cluster.output()
