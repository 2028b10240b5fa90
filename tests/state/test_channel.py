import json
import os
import select
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.state import Channel, ChannelClosed
from thinned import examples


@pytest.fixture
def ends():
    first, second = Channel.pair()
    yield first, second
    first.close()
    second.close()


def receive_all(line, count, timeout_s=10.0):
    messages = []
    while len(messages) < count:
        messages += line.receive(timeout_s)
    return messages


def memory(content):
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


def content_of(descriptor):
    content = os.pread(descriptor, 1000, 0)
    os.close(descriptor)
    return content


def test_receive_returns_nothing_if_nothing_was_sent(ends):
    assert ends[0].receive() == []
    assert ends[0].receive(0.01) == []


def test_both_directions_and_all_of_json(ends):
    first, second = ends
    fields = {"step": 3, "loss": 0.1, "name": "größe\nπ", "list": [1, None, {"x": []}], "yes": True}
    for sender, receiver in ((first, second), (second, first)):
        sender.send("hello", **fields)
        (message,) = receiver.receive(10.0)
        assert (message.kind, message.fields, message.descriptors) == ("hello", fields, [])


def test_messages_arrive_in_order(ends):
    for number in range(100):
        ends[0].send("count", number=number)
    messages = ends[1].receive()
    assert [message.fields["number"] for message in messages] == list(range(100))


def test_descriptors_arrive_with_their_message(ends):
    """Between messages without any, in both directions, several with one."""
    for sender, receiver in (ends, ends[::-1]):
        sent = []
        for number in range(5):
            mine = [memory(f"{number}-{i}".encode()) for i in range(number)]
            sender.send("files", mine, number=number)
            sender.send("between")
            sent += mine
        for descriptor in sent:
            os.close(descriptor)
        messages = receive_all(receiver, 10)
        assert [message.kind for message in messages] == ["files", "between"] * 5
        for number, message in enumerate(messages[::2]):
            want = [f"{number}-{i}".encode() for i in range(number)]
            assert [content_of(descriptor) for descriptor in message.descriptors] == want
        assert all(not message.descriptors for message in messages[1::2])


def test_as_many_descriptors_as_one_message_carries(ends):
    held = memory(b"x")
    ends[0].send("many", [held] * 250)
    (message,) = receive_all(ends[1], 1)
    assert len(set(message.descriptors)) == 250
    for descriptor in (held, *message.descriptors):
        os.close(descriptor)


@pytest.mark.parametrize("size", [60_000, 65_536, 1_000_000])
def test_long_messages_with_descriptors(ends, size):
    """Longer than what the kernel holds at a time: the sender waits, and the receiver puts it together."""
    first, second = ends
    text = "".join(chr(ord("a") + i % 26) for i in range(size))
    files = [memory(b"first"), memory(b"second")]

    def say():
        first.send("long", [files[0]], text=text)
        first.send("short", [files[1]])
        first.send("long", text=text[::-1])

    sender = threading.Thread(target=say)
    sender.start()
    messages = receive_all(second, 3)
    sender.join(10)
    assert [message.kind for message in messages] == ["long", "short", "long"]
    assert messages[0].fields["text"] == text
    assert messages[2].fields["text"] == text[::-1]
    assert [content_of(fd) for message in messages for fd in message.descriptors] == [b"first", b"second"]
    for descriptor in files:
        os.close(descriptor)


def test_a_message_that_comes_in_bits(ends):
    """Written to the socket itself, a byte at a time: nothing is given out before it is whole."""
    first, second = ends
    line = b'{"kind": "slow", "descriptors": 0, "n": 1}\n'
    for i in range(len(line) - 1):
        os.write(first.fileno(), line[i : i + 1])
        assert second.receive() == []
    os.write(first.fileno(), line[-1:] + b'{"kind": "next", ')
    assert [message.kind for message in second.receive()] == ["slow"]
    os.write(first.fileno(), b'"descriptors": 0}\n')
    assert [message.kind for message in second.receive()] == ["next"]


def test_messages_before_close_are_delivered(ends):
    first, second = ends
    file = memory(b"last words")
    first.send("first")
    first.send("last", [file])
    os.close(file)
    first.close()
    messages = receive_all(second, 2)
    with pytest.raises(ChannelClosed):
        second.receive(10.0)
    assert [message.kind for message in messages] == ["first", "last"]
    assert [content_of(fd) for fd in messages[1].descriptors] == [b"last words"]
    with pytest.raises(ChannelClosed):
        second.receive()


def test_half_a_message_is_not_delivered(ends):
    first, second = ends
    os.write(first.fileno(), b'{"kind": "cut off"')
    first.close()
    with pytest.raises(ChannelClosed):
        second.receive(10.0)


def test_send_to_a_closed_end_raises(ends):
    first, second = ends
    second.close()
    for _ in range(3):
        with pytest.raises(ChannelClosed):
            first.send("hello?")


def test_messages_are_delivered_even_if_the_sender_left_some_unread(ends):
    """An end that goes with something unread resets the line; its own words still count."""
    first, second = ends
    second.send("unread")
    first.send("goodbye")
    first.close()
    assert [message.kind for message in second.receive(10.0)] == ["goodbye"]
    with pytest.raises(ChannelClosed):
        second.receive(10.0)


def test_blocking_receive_ends_with_the_next_message(ends):
    first, second = ends
    timer = threading.Timer(0.05, first.send, ("word",))
    timer.start()
    assert [message.kind for message in second.receive(None)] == ["word"]
    timer.join()


MESSAGES = [{"n": number, "of": {"list": [1, [2]], "text": 'a "}" and a {'}} for number in range(3)]
LINES = [json.dumps({"kind": "word", "descriptors": 0, **word}).encode() + b"\n" for word in MESSAGES]


@settings(max_examples=examples(60), deadline=None)
@given(at=st.integers(0, len(LINES[1])))
def test_writer_dying_mid_message_spoils_no_other_message(at):
    """Another process takes its end over, and says the next thing."""
    mine, other = socket.socketpair()
    second = Channel(other)
    mine.sendall(LINES[0] + LINES[1][:at])
    again = Channel(mine)
    again.take_over()
    again.send("word", **MESSAGES[2])
    received = [message.fields for message in receive_all(second, 2 + (at >= len(LINES[1]) - 1))]
    assert received == (MESSAGES if at >= len(LINES[1]) - 1 else [MESSAGES[0], MESSAGES[2]])
    assert second.receive() == []
    again.close()
    second.close()


@settings(max_examples=examples(60), deadline=None)
@given(at=st.integers(0, len(LINES[1])))
def test_reader_dying_mid_message_spoils_no_other_message(at):
    """What it has read is lost with it; the process that takes its end over hears everything from the next word on."""
    first, second = Channel.pair()
    for word in MESSAGES:
        first.send("word", **word)
    os.read(second.fileno(), len(LINES[0]) + at)
    received = [message.fields for message in receive_all(second, 1 + (at == 0))]
    assert received == (MESSAGES[1:] if at == 0 else MESSAGES[2:])
    first.close()
    second.close()


def test_descriptors_of_a_truncated_message_are_closed(ends):
    """A writer dies after the descriptors, which go with the first byte, and before the end of the word."""
    first, second = ends
    files = [memory(b"of the dead"), memory(b"of the living")]
    lost = json.dumps({"kind": "lost", "descriptors": 1}).encode()
    socket.send_fds(first._socket, [lost[:-1]], files[:1])
    first.take_over()
    first.send("next", files[1:])
    (message,) = receive_all(second, 1)
    assert message.kind == "next"
    assert [content_of(descriptor) for descriptor in message.descriptors] == [b"of the living"]
    for descriptor in files:
        os.close(descriptor)


def test_it_can_be_waited_for_with_select(ends):
    assert select.select([ends[1]], [], [], 0)[0] == []
    ends[0].send("x")
    assert select.select([ends[1]], [], [], 10)[0] == [ends[1]]
