"""The machine that leads is lost: another one does, and the run ends in the bits of one that nothing happened to."""

import os
import re
import signal
import time

import pytest
from machines import machines

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
def unharmed(tmp_path_factory, make_lab, recipe) -> Lived:
    """Two workers on one node, that nothing happened to."""
    lived = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    return lived


@pytest.mark.slow
def test_the_machine_that_leads_is_lost(recipe, tmp_path, unharmed: Lived) -> None:
    """Three machines for two workers: the third takes the first's place, the second leads."""
    with machines(recipe(SETTINGS), tmp_path, count=2, spares=1, workers=2) as there:
        for number in range(3):
            there.start(number)
        there.until(lambda: there.copied() > 20)
        there.lose(0)
        assert there.ends() == {1: 0, 2: 0}, there.said()
        there.assert_same_end(unharmed)
        (told,) = there.ways_on
        assert re.fullmatch(r"leader \S+-0 was lost; \S+-1 is the new leader; resuming from step \d+ \(memory\)", told)
        assert newest_lease(there.run.leases).number == 3  # to lead, and for the attempt


@pytest.mark.slow
def test_the_machine_that_leads_is_lost_and_there_is_one_left(recipe, tmp_path) -> None:
    with machines(recipe(SETTINGS), tmp_path, count=2, spares=0, workers=2) as there:
        there.start(0)
        there.start(1)
        there.until(lambda: there.copied() > 20)
        there.lose(0)
        assert there.ends() == {1: 0}, there.said()
        assert [event["workers"] for event in there.events("attempt")] == [2, 1]
        (told,) = there.ways_on
        assert re.search(
            r"-1 is the new leader; resuming from step \d+ \(memory\), with one worker instead of 2$", told
        )


@pytest.mark.slow
def test_who_led_and_was_away_stops_and_serves(recipe, tmp_path, unharmed: Lived) -> None:
    """The machine that leads is frozen as a whole; when it moves again another leads, and it commits nothing."""
    with machines(recipe(SETTINGS), tmp_path, count=2, spares=1, workers=2) as there:
        for number in range(3):
            there.start(number)
        there.until(lambda: there.copied() > 20)
        frozen = there.everything_of(0)
        for process in frozen:
            process.suspend()
        there.until(lambda: there.ways_on)
        for process in frozen:
            process.resume()
        assert there.ends() == {0: 0, 1: 0, 2: 0}, there.said()
        there.assert_same_end(unharmed)
        assert "another machine's agent leads this run now" in there.said()
        assert len(there.ways_on) == 1


@pytest.mark.slow
def test_a_machine_that_comes_back_has_workers_again(recipe, tmp_path) -> None:
    """Two machines, one of them lost: one worker goes on, and two as soon as it is there again."""
    with machines(recipe(SETTINGS), tmp_path, count=2, spares=0, workers=2) as there:
        there.start(0)
        there.start(1)
        there.until(lambda: there.copied() > 20)
        there.lose(1)
        there.until(lambda: len(there.events("attempt")) == 2)
        there.start(1)
        assert there.ends() == {0: 0, 1: 0}, there.said()
        assert [event["workers"] for event in there.events("attempt")] == [2, 1, 2]
        lost, room = there.ways_on
        assert re.search(r"with one worker instead of 2$", lost)
        assert re.fullmatch(
            r"there is room for 2 workers again; resuming from step \d+ \(memory\), with 2 .* of 1", room
        )


@pytest.mark.slow
def test_a_run_that_wants_all_its_workers_waits_for_the_machine(recipe, tmp_path, unharmed: Lived) -> None:
    with machines(recipe(SETTINGS | {"train.fewest_workers": 2}), tmp_path, count=2, spares=0, workers=2) as there:
        there.start(0)
        there.start(1)
        there.until(lambda: there.copied() > 20)
        there.lose(1)
        there.until(lambda: there.ways_on)
        there.start(1)
        assert there.ends() == {0: 0, 1: 0}, there.said()
        there.assert_same_end(unharmed)
        (told,) = there.ways_on
        assert re.search(r"resuming from step \d+ \((memory|disk)\), once a replacement node joins$", told)


@pytest.mark.slow
def test_a_machine_is_lost_while_the_run_recovers_from_the_loss_of_another(recipe, tmp_path, unharmed: Lived) -> None:
    with machines(recipe(SETTINGS), tmp_path, count=2, spares=2, workers=2) as there:
        for number in range(4):
            there.start(number)
        there.until(lambda: there.copied() > 20)
        there.lose(1)
        there.until(lambda: there.ways_on)
        there.lose(2)
        assert there.ends() == {0: 0, 3: 0}, there.said()
        there.assert_same_end(unharmed)


@pytest.mark.slow
def test_a_machine_whose_workers_die_twice_is_done_without_and_engines_are_told(recipe, tmp_path, unharmed) -> None:
    with machines(recipe(SETTINGS), tmp_path, count=2, spares=1, workers=2) as there:
        for number in range(3):
            there.start(number)
        there.until(lambda: there.copied() > 20)
        for attempt in (1, 2):
            there.until(lambda: len(there.events("worker")) == 2 * attempt)  # noqa: B023
            (pid,) = [event["pid"] for event in there.events("worker")[-2:] if event["rank"] == 1]
            os.kill(pid, signal.SIGKILL)
        assert there.ends() == {0: 0, 1: 0, 2: 0}, there.said()
        there.assert_same_end(unharmed)
        assert "without node" in there.ways_on[1]
        assert list(read_suspects(there.run.path, time.time())) == ["b"]
        assert "worker 1 was killed by signal 9" in there.run.suspects_file.read_text()


@pytest.mark.slow
def test_a_second_agent_of_a_machine_is_refused_and_harms_nobody(recipe, tmp_path, unharmed: Lived) -> None:
    with machines(recipe(SETTINGS), tmp_path, count=2, spares=0, workers=2) as there:
        there.start(0)
        there.start(1)
        there.until(lambda: there.copied() > 5)
        first = there.processes.pop(1)
        there.start(1)
        assert there.processes.pop(1).wait(CEILING_S) == (1 if first.poll() is None else 0), there.said()
        there.processes[1] = first
        assert there.ends() == {0: 0, 1: 0}, there.said()
        there.assert_same_end(unharmed)
        assert there.ways_on == []
        there.start(1)  # of a run that is over
        assert there.ends() == {0: 0, 1: 0}
        assert "has finished already" in there.said()
