"""Leader election: one leader at a time under any partition, and no other agent commits."""

import multiprocessing
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.agent.nodes.lease import (
    ANOTHER_LEADS,
    MINORITY_S,
    LeaderLease,
    newest_lease,
    take_lease,
    takeover_delay_s,
)
from headway.agent.nodes.lease_record import LeaseRecord
from headway.errors import RunError, StateError
from headway.state import CheckpointFacts, begin_checkpoint, commit, fence, list_checkpoints
from thinned import examples

FACTS = CheckpointFacts(cursor=0, chain="", data_version="", recipe={}, mesh={})


def take_many(folder: Path, name: str, barrier, results) -> None:
    barrier.wait()
    results.put((name, [number for number in range(1, 51) if take_lease(folder, LeaseRecord(number, name, "h", 1))]))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork, where threads were started
def test_each_lease_has_one_holder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # takers only create files
    barrier, results = context.Barrier(4), context.SimpleQueue()
    takers = [context.Process(target=take_many, args=(tmp_path / "l", str(n), barrier, results)) for n in range(4)]
    for taker in takers:
        taker.start()
    taken = dict(results.get() for _ in takers)
    for taker in takers:
        taker.join()
    assert sorted(number for numbers in taken.values() for number in numbers) == list(range(1, 51))
    newest = newest_lease(tmp_path / "l")
    assert newest is not None
    assert (newest.number, 50 in taken[newest.lead]) == (50, True)


def test_superseded_leader_knows_and_cannot_claim(tmp_path: Path) -> None:
    first, second = LeaderLease(tmp_path, "a", "h", 1), LeaderLease(tmp_path, "b", "h", 2)
    first.begin()
    assert (first.number, first.refusal(), first.lost()) == (1, None, False)
    assert first.claim()
    second.begin()  # the run was started again elsewhere
    assert (second.number, second.refusal()) == (3, None)
    assert (first.refusal(), first.lost()) == (ANOTHER_LEADS, True)
    assert (first.claim(), first.number) == (False, 2)
    assert newest_lease(tmp_path) == LeaseRecord(3, "b", "h", 2)


def test_two_agents_that_begin_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.agent.nodes.lease.newest_lease", lambda _folder: None)
    LeaderLease(tmp_path, "a", "h", 1).begin()
    with pytest.raises(RunError, match="another agent has begun to lead"):
        LeaderLease(tmp_path, "b", "h", 2).begin()


def test_lease_that_is_being_written_counts_without_a_leader(tmp_path: Path) -> None:
    take_lease(tmp_path, LeaseRecord(1, "a", "h", 1))
    (tmp_path / "000002.json").write_text('{"num')
    assert newest_lease(tmp_path) == LeaseRecord(2, "", "", 0)
    assert newest_lease(tmp_path / "nowhere") is None


def test_without_the_newest_lease_nothing_is_committed(tmp_path: Path) -> None:
    lease = LeaderLease(tmp_path / "leases", "a", "h", 1)
    lease.begin()
    save = begin_checkpoint(tmp_path / "checkpoints", 5)
    take_lease(tmp_path / "leases", LeaseRecord(2, "b", "h", 2))
    with pytest.raises(StateError, match="another agent leads the run"):
        commit(save, FACTS, [], 1, lease.refusal)
    assert list_checkpoints(tmp_path / "checkpoints") == []


def test_leader_superseded_between_check_and_commit_cannot_commit(tmp_path: Path) -> None:
    """It was suspended between the check of its lease and the commit; the new leader has fenced its folder."""
    checkpoints = tmp_path / "checkpoints"
    commit(begin_checkpoint(checkpoints, 5), FACTS, [], 1)
    before = {path.name: path.stat().st_ino for path in checkpoints.glob("step-*/*")}
    save = begin_checkpoint(checkpoints, 5)

    def superseded_meanwhile() -> None:
        fence(checkpoints)

    with pytest.raises(StateError, match="could not be committed"):
        commit(save, FACTS, [], 1, superseded_meanwhile)
    (entry,) = list_checkpoints(checkpoints)
    assert {path.name: path.stat().st_ino for path in entry.path.iterdir()} == before


NAMES = [f"n{number}" for number in range(7)]


@settings(max_examples=examples(50))
@given(st.sets(st.sampled_from(NAMES), min_size=1), st.data())
def test_larger_part_of_a_partition_leads_first(everyone: set[str], data: st.DataObject) -> None:
    """For any partition, with the former leader in either part or lost."""
    lost = data.draw(st.sampled_from(["", *sorted(everyone)]))
    first = data.draw(st.sets(st.sampled_from(sorted(everyone)))) - {lost}
    parts = [part for part in (first, everyone - first - {lost}) if part]

    def turns(part: set[str]) -> list[float]:
        delays = [
            takeover_delay_s(name, {other: False if other in part else None for other in everyone}) for name in part
        ]
        return sorted(turn for turn in delays if turn is not None)

    for part in parts:
        assert len(set(turns(part))) == len(part)  # no two at the same time
        small = 2 * len(part) < len(everyone)
        assert (turns(part)[0] >= MINORITY_S) == small
    if len(parts) == 2 and len(parts[0]) > len(everyone) / 2:
        assert turns(parts[0])[0] < turns(parts[1])[0]


def test_no_takeover_while_any_voter_hears_the_leader() -> None:
    for hears in product([True, False, None], repeat=2):
        voters = {"a": False, "b": hears[0], "c": hears[1]}
        assert (takeover_delay_s("a", voters) is None) == (True in hears)
    assert takeover_delay_s("z", {"a": False}) is None  # only voters may lead


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write a leader lease"):
        take_lease(tmp_path / "file" / "leases", LeaseRecord(1, "a", "h", 1))
