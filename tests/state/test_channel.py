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
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


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


def test_nothing_said_is_nothing_received(ends):
    assert ends[0].receive() == []
    assert ends[0].receive(0.01) == []


def test_both_directions_and_all_of_json(ends):
    ours, theirs = ends
    fields = {"step": 3, "loss": 0.1, "name": "größe\nπ", "list": [1, None, {"x": []}], "yes": True}
    for sender, receiver in ((ours, theirs), (theirs, ours)):
        sender.send("hello", **fields)
        (message,) = receiver.receive(10.0)
        assert (message.kind, message.fields, message.descriptors) == ("hello", fields, [])


def test_several_come_in_the_order_they_were_said(ends):
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
    one = memory(b"x")
    ends[0].send("many", [one] * 250)
    (message,) = receive_all(ends[1], 1)
    assert len(set(message.descriptors)) == 250
    for descriptor in (one, *message.descriptors):
        os.close(descriptor)


@pytest.mark.parametrize("size", [60_000, 65_536, 1_000_000])
def test_long_messages_with_descriptors(ends, size):
    """Longer than what the kernel holds at a time: the sender waits, and the receiver puts it together."""
    ours, theirs = ends
    text = "".join(chr(ord("a") + i % 26) for i in range(size))
    files = [memory(b"first"), memory(b"second")]

    def say():
        ours.send("long", [files[0]], text=text)
        ours.send("short", [files[1]])
        ours.send("long", text=text[::-1])

    sender = threading.Thread(target=say)
    sender.start()
    messages = receive_all(theirs, 3)
    sender.join(10)
    assert [message.kind for message in messages] == ["long", "short", "long"]
    assert messages[0].fields["text"] == text
    assert messages[2].fields["text"] == text[::-1]
    assert [content_of(fd) for message in messages for fd in message.descriptors] == [b"first", b"second"]
    for descriptor in files:
        os.close(descriptor)


def test_a_message_that_comes_in_bits(ends):
    """Written to the socket itself, a byte at a time: nothing is given out before it is whole."""
    ours, theirs = ends
    line = b'{"kind": "slow", "descriptors": 0, "n": 1}\n'
    for i in range(len(line) - 1):
        os.write(ours.fileno(), line[i : i + 1])
        assert theirs.receive() == []
    os.write(ours.fileno(), line[-1:] + b'{"kind": "next", ')
    assert [message.kind for message in theirs.receive()] == ["slow"]
    os.write(ours.fileno(), b'"descriptors": 0}\n')
    assert [message.kind for message in theirs.receive()] == ["next"]


def test_what_was_said_before_the_end_is_delivered(ends):
    ours, theirs = ends
    file = memory(b"last words")
    ours.send("first")
    ours.send("last", [file])
    os.close(file)
    ours.close()
    messages = receive_all(theirs, 2)
    with pytest.raises(ChannelClosed):
        theirs.receive(10.0)
    assert [message.kind for message in messages] == ["first", "last"]
    assert [content_of(fd) for fd in messages[1].descriptors] == [b"last words"]
    with pytest.raises(ChannelClosed):
        theirs.receive()


def test_half_a_message_is_never_one(ends):
    ours, theirs = ends
    os.write(ours.fileno(), b'{"kind": "cut off"')
    ours.close()
    with pytest.raises(ChannelClosed):
        theirs.receive(10.0)


def test_nobody_hears(ends):
    ours, theirs = ends
    theirs.close()
    for _ in range(3):
        with pytest.raises(ChannelClosed):
            ours.send("hello?")


def test_what_was_said_is_delivered_though_the_other_end_did_not_read(ends):
    """An end that goes with something unread resets the line; its own words still count."""
    ours, theirs = ends
    theirs.send("unread")
    ours.send("goodbye")
    ours.close()
    assert [message.kind for message in theirs.receive(10.0)] == ["goodbye"]
    with pytest.raises(ChannelClosed):
        theirs.receive(10.0)


def test_waiting_ends_with_the_next_word(ends):
    ours, theirs = ends
    timer = threading.Timer(0.05, ours.send, ("word",))
    timer.start()
    assert [message.kind for message in theirs.receive(None)] == ["word"]
    timer.join()


WORDS = [{"n": number, "of": {"list": [1, [2]], "text": 'a "}" and a {'}} for number in range(3)]
LINES = [json.dumps({"kind": "word", "descriptors": 0, **word}).encode() + b"\n" for word in WORDS]


@settings(max_examples=examples(60), deadline=None)
@given(at=st.integers(0, len(LINES[1])))
def test_a_writer_that_dies_in_the_middle_of_a_word_spoils_no_other(at):
    """Another process takes its end over, and says the next thing."""
    mine, other = socket.socketpair()
    theirs = Channel(other)
    mine.sendall(LINES[0] + LINES[1][:at])
    again = Channel(mine)
    again.take_over()
    again.send("word", **WORDS[2])
    found = [message.fields for message in receive_all(theirs, 2 + (at >= len(LINES[1]) - 1))]
    assert found == ([WORDS[0], WORDS[1], WORDS[2]] if at >= len(LINES[1]) - 1 else [WORDS[0], WORDS[2]])
    assert theirs.receive() == []
    again.close()
    theirs.close()


@settings(max_examples=examples(60), deadline=None)
@given(at=st.integers(0, len(LINES[1])))
def test_a_reader_that_dies_in_the_middle_of_a_word_spoils_no_other(at):
    """What it has read is lost with it; the process that takes its end over hears everything from the next word on."""
    ours, theirs = Channel.pair()
    for word in WORDS:
        ours.send("word", **word)
    os.read(theirs.fileno(), len(LINES[0]) + at)
    found = [message.fields for message in receive_all(theirs, 1 + (at == 0))]
    assert found == (WORDS[1:] if at == 0 else WORDS[2:])
    ours.close()
    theirs.close()


def test_descriptors_of_a_word_that_was_cut_off_go_to_no_other(ends):
    """A writer dies after the descriptors, which go with the first byte, and before the end of the word."""
    ours, theirs = ends
    files = [memory(b"of the dead"), memory(b"of the living")]
    lost = json.dumps({"kind": "lost", "descriptors": 1}).encode()
    socket.send_fds(ours._socket, [lost[:-1]], files[:1])
    ours.take_over()
    ours.send("next", files[1:])
    (message,) = receive_all(theirs, 1)
    assert message.kind == "next"
    assert [content_of(descriptor) for descriptor in message.descriptors] == [b"of the living"]
    for descriptor in files:
        os.close(descriptor)


def test_it_can_be_waited_for_with_select(ends):
    assert select.select([ends[1]], [], [], 0)[0] == []
    ends[0].send("x")
    assert select.select([ends[1]], [], [], 10)[0] == [ends[1]]
