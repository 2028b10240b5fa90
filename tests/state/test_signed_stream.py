"""Frames between machines: what a man in the middle may do, and that none of it is believed."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from headway.state import Channel, ChannelClosed
from headway.state.handshake import client_handshake, server_handshake
from headway.state.signed_stream import FRAME_BYTES, FrameRejected, SignedStream

KEY = "a key of the tests, and long enough"
HEADER = 20


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        return caller, server.accept()[0]


def authenticate(caller: socket.socket, listener: socket.socket) -> tuple[SignedStream, SignedStream]:
    streams = list[SignedStream]()
    thread = threading.Thread(target=lambda: streams.append(server_handshake(listener, KEY)))
    thread.start()
    calling = client_handshake(caller, KEY)
    thread.join()
    return calling, streams[0]


@dataclass
class Link:
    """Two streams, and what is between them: the test moves the bytes."""

    sender: SignedStream
    tap: socket.socket
    wire: socket.socket
    receiver: SignedStream
    frames: list[bytes] = field(default_factory=list)

    def send(self, content: bytes) -> bytes:
        """The frame on the wire."""
        self.sender.sendall(content)
        frame = b""
        while len(frame) < HEADER + len(content):
            frame += self.tap.recv(1 << 16)
        return frame


@pytest.fixture
def link() -> Iterator[Link]:
    """After the handshake each half gets a socket of its own."""
    caller, listener = connected()
    sending, receiving = authenticate(caller, listener)
    (out, tap), (wire, into) = socket.socketpair(), socket.socketpair()
    sending._end, receiving._end = out, into
    with caller, listener, out, tap, wire, into:
        yield Link(sending, tap, wire, receiving)


def changed(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


ATTACKS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "changed content": lambda frames: [frames[0], changed(frames[1], HEADER)],
    "changed MAC": lambda frames: [frames[0], changed(frames[1], 7)],
    "impossible length": lambda frames: [frames[0], changed(frames[1], 0)],
    "shorter": lambda frames: [frames[0], changed(frames[1], 3)[:-1] + frames[2]],
    "replayed": lambda frames: [frames[0], frames[0]],
    "left out": lambda frames: [frames[0], frames[2]],
    "reordered": lambda frames: [frames[1], frames[0]],
}


def read_all(receiver: SignedStream, reads: str, accepted: list[bytes]) -> None:
    while True:
        out = bytearray(7)
        match reads:
            case "line":
                accepted.append(receiver.readline())
            case "fill":
                receiver.fill(memoryview(out))
                accepted.append(bytes(out))
            case "available":
                accepted += [line for line in (receiver.receive_available() or b"").splitlines(True) if line]


@pytest.mark.parametrize("reads", ["line", "fill", "available"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_frame_that_is_not_the_next_one_sent_is_rejected(attack: str, reads: str, link: Link, capfd) -> None:
    frames = [link.send(content) for content in (b"first \n", b"second\n", b"third \n")]
    link.wire.sendall(b"".join(ATTACKS[attack](frames)))
    link.wire.close()
    accepted = list[bytes]()
    with pytest.raises(FrameRejected):
        read_all(link.receiver, reads, accepted)
    assert accepted in ([], [b"first \n"])
    assert "rejected frame" in capfd.readouterr().err


def test_frame_of_the_other_direction_or_another_connection_is_rejected(link: Link) -> None:
    frame = link.send(b"mine\n")
    link.receiver._receive_key, link.receiver._send_key = link.receiver._send_key, link.receiver._receive_key
    link.wire.sendall(frame)
    with pytest.raises(FrameRejected):
        link.receiver.readline()
    one, two = connected()
    with one, two:
        _, again = authenticate(one, two)
        again._end = link.receiver._end
        link.wire.sendall(frame)
        with pytest.raises(FrameRejected):
            again.readline()


def test_bytes_arrive_whatever_their_size_and_the_reads() -> None:
    caller, listener = connected()
    with caller, listener:
        sender, receiver = authenticate(caller, listener)
        content = os.urandom(2 * FRAME_BYTES + 12345)
        thread = threading.Thread(target=lambda: (sender.sendall(b"line\n" + content), sender.sendall(b"last\n")))
        thread.start()
        assert receiver.readline() == b"line\n"
        received, reads = bytearray(len(content)), [1, 70000, FRAME_BYTES, len(content)]
        begin = 0
        for size in reads:
            receiver.fill(memoryview(received)[begin : begin + size])
            begin += size
        assert received == content
        assert receiver.readline() == b"last\n"
        thread.join()


def test_channel_over_a_connection_closes_when_a_message_was_changed(link: Link) -> None:
    channel = Channel(link.receiver)
    link.wire.sendall(link.send(b'{"kind": "hello", "descriptors": 0, "x": 1}\n'))
    (message,) = channel.receive(60.0)
    assert (message.kind, message.fields) == ("hello", {"x": 1})
    frame = link.send(b'{"kind": "bye", "descriptors": 0}\n')
    link.wire.sendall(frame[:30])
    assert channel.receive(0.0) == [], "half of a frame"
    link.wire.sendall(changed(frame, 40)[30:])
    with pytest.raises(ChannelClosed):
        channel.receive(60.0)
