"""What an agent puts aside is what its keeper has, however much it is."""

import os

import pytest

from headway.agent.fd_store import FdEntry, FdReassembler, FdStore, send_chunked
from headway.state import Channel


@pytest.fixture
def ends():
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def memory(content: str) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(descriptor, content.encode())
    return descriptor


def contents(descriptors) -> list[str]:
    """What lies behind descriptors, which are then closed."""
    found = [os.pread(descriptor, 100, 0).decode() for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return found


def heard(line: Channel, parts: FdReassembler, count: int) -> list[tuple[str, dict, list[str]]]:
    """So many whole messages: kind, fields, what lies behind their descriptors."""
    found = []
    while len(found) < count:
        wholes = [whole for message in line.receive(10.0) if (whole := parts.join(message)) is not None]
        found += [(whole.kind, whole.fields, contents(whole.descriptors)) for whole in wholes]
    return found


@pytest.mark.parametrize("count", [0, 1, 2, 199, 200, 201, 250, 253, 254, 400, 401, 450])
def test_any_number_of_descriptors_comes_with_its_message_in_order(ends, count: int) -> None:
    """The kernel passes at most 253 at a time. Before and behind it are messages with few and with none."""
    ours, theirs = ends
    many = [memory(str(number)) for number in range(count)]
    one = memory("one")
    send_chunked(ours, "first", [one], n=1)
    send_chunked(ours, "many", many, n=count, text="x" * 1000)
    send_chunked(ours, "none")
    send_chunked(ours, "last", [one], n=2)
    for descriptor in (one, *many):
        os.close(descriptor)
    assert heard(theirs, FdReassembler(), 4) == [
        ("first", {"n": 1}, ["one"]),
        ("many", {"n": count, "text": "x" * 1000}, [str(number) for number in range(count)]),
        ("none", {}, []),
        ("last", {"n": 2}, ["one"]),
    ]


def test_what_is_put_and_dropped_is_told(ends) -> None:
    ours, theirs = ends
    kept, one, two = FdStore(ours), memory("1"), memory("2")
    kept.put("a", [one], x=1)
    kept.put("b", [two, one], y=[1, {"z": None}])
    kept.put("a", [two], x=2)
    kept.drop("b")
    kept.drop("b")
    kept.drop("never there")
    assert kept.entries == {"a": FdEntry({"x": 2}, (two,))}
    assert kept.get("a") == FdEntry({"x": 2}, (two,))
    assert kept.get("b") is None
    assert heard(theirs, FdReassembler(), 4) == [
        ("keep", {"name": "a", "fields": {"x": 1}}, ["1"]),
        ("keep", {"name": "b", "fields": {"y": [1, {"z": None}]}}, ["2", "1"]),
        ("keep", {"name": "a", "fields": {"x": 2}}, ["2"]),
        ("drop", {"name": "b"}, []),
    ]
    assert theirs.receive() == []
    assert contents([one, two]) == ["1", "2"], "they stay the agent's own"


def test_an_agent_without_a_keeper_remembers_for_itself(ends) -> None:
    """There was none; or there is none any more, which the agent notices elsewhere."""
    alone = FdStore(entries={"old": FdEntry({"n": 1})})
    ours, theirs = ends
    left = FdStore(ours, {"old": FdEntry({"n": 1})})
    theirs.close()
    for kept in (alone, left):
        kept.put("new", [0], n=2)
        kept.put("new", [1, 0], n=3)
        kept.drop("old")
        assert kept.entries == {"new": FdEntry({"n": 3}, (1, 0))}


def test_what_was_handed_over_is_not_told_back(ends) -> None:
    ours, theirs = ends
    kept = FdStore(ours, {"a": FdEntry({"x": 1})})
    assert kept.get("a") == FdEntry({"x": 1})
    assert theirs.receive() == []
    kept.drop("a")
    assert [message.fields for message in theirs.receive(10.0)] == [{"name": "a"}]
