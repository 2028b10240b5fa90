"""The launcher has what the agent stored, with any number of descriptors."""

import os

import pytest

from headway.agent.fd_store import FdEntry, FdReassembler, FdStore, send_chunked
from headway.state import Channel


@pytest.fixture
def channels():
    agent, launcher = Channel.pair()
    yield agent, launcher
    agent.close()
    launcher.close()


def memory(content: str) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(descriptor, content.encode())
    return descriptor


def contents(descriptors) -> list[str]:
    """Read the contents of descriptors and close them."""
    texts = [os.pread(descriptor, 100, 0).decode() for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return texts


def receive(channel: Channel, count: int) -> list[tuple[str, dict, list[str]]]:
    """Receive so many complete messages: kind, fields, contents of their descriptors."""
    messages, reassembler = [], FdReassembler()
    while len(messages) < count:
        for chunk in channel.receive(10.0):
            if (message := reassembler.join(chunk)) is not None:
                messages.append((message.kind, message.fields, contents(message.descriptors)))
    return messages


@pytest.mark.parametrize("count", [0, 1, 2, 199, 200, 201, 250, 253, 254, 400, 401, 450])
def test_any_number_of_descriptors_arrives_in_order_with_its_message(channels, count: int) -> None:
    """The kernel passes at most 253 at a time. Messages with few and with none come before and after."""
    agent, launcher = channels
    many = [memory(str(number)) for number in range(count)]
    single = memory("one")
    send_chunked(agent, "first", [single], n=1)
    send_chunked(agent, "many", many, n=count, text="x" * 1000)
    send_chunked(agent, "none")
    send_chunked(agent, "last", [single], n=2)
    for descriptor in (single, *many):
        os.close(descriptor)
    assert receive(launcher, 4) == [
        ("first", {"n": 1}, ["one"]),
        ("many", {"n": count, "text": "x" * 1000}, [str(number) for number in range(count)]),
        ("none", {}, []),
        ("last", {"n": 2}, ["one"]),
    ]


def test_puts_and_drops_reach_the_launcher(channels) -> None:
    agent, launcher = channels
    store, first, second = FdStore(agent), memory("1"), memory("2")
    store.put("a", [first], x=1)
    store.put("b", [second, first], y=[1, {"z": None}])
    store.put("a", [second], x=2)
    store.drop("b")
    store.drop("b")
    store.drop("never there")
    assert store.entries == {"a": FdEntry({"x": 2}, (second,))}
    assert store.get("a") == FdEntry({"x": 2}, (second,))
    assert store.get("b") is None
    assert receive(launcher, 4) == [
        ("keep", {"name": "a", "fields": {"x": 1}}, ["1"]),
        ("keep", {"name": "b", "fields": {"y": [1, {"z": None}]}}, ["2", "1"]),
        ("keep", {"name": "a", "fields": {"x": 2}}, ["2"]),
        ("drop", {"name": "b"}, []),
    ]
    assert launcher.receive() == []
    assert contents([first, second]) == ["1", "2"], "they stay open in the agent"


def test_store_without_a_launcher_is_a_dictionary(channels) -> None:
    """Whether there never was one, or it is gone."""
    never = FdStore(entries={"old": FdEntry({"n": 1})})
    agent, launcher = channels
    gone = FdStore(agent, {"old": FdEntry({"n": 1})})
    launcher.close()
    for store in (never, gone):
        store.put("new", [0], n=2)
        store.put("new", [1, 0], n=3)
        store.drop("old")
        assert store.entries == {"new": FdEntry({"n": 3}, (1, 0))}


def test_inherited_entries_are_not_sent_back(channels) -> None:
    agent, launcher = channels
    store = FdStore(agent, {"a": FdEntry({"x": 1})})
    assert store.get("a") == FdEntry({"x": 1})
    assert launcher.receive() == []
    store.drop("a")
    assert [message.fields for message in launcher.receive(10.0)] == [{"name": "a"}]
