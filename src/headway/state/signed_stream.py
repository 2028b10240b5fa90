"""An authenticated connection between two machines: bytes in frames, each with a MAC over its number and content.

    length (4 bytes)   MAC (16)   content (at most 1 MiB)

The MAC is HMAC-SHA256, cut to 128 bits, of the frame's number in its direction, its length and its content. Each
direction of each connection has a key of its own, derived from the run's key and both challenges of the handshake
(handshake.py). So a frame that was changed, left out, repeated, reordered, reflected, or recorded on another connection
is rejected, and the connection with it. Nothing is encrypted.
"""

import contextlib
import hmac
import socket
import struct
import sys
import threading

FRAME_BYTES = 1 << 20
MAC_BYTES = 16
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">QI")
_HEADER_BYTES = _LENGTH.size + MAC_BYTES
_READ_BYTES = 1 << 16
_SMALL_BYTES = 1 << 14
"""A frame up to this size is copied to be sent with its header."""


class FrameRejected(ConnectionError):
    """A frame is not the next one that the other end sent."""


class SignedStream:
    """One end of a connection whose ends have authenticated each other."""

    def __init__(self, end: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._end, self._send_key, self._receive_key = end, send_key, receive_key
        self._sent = self._received = 0
        self._lock = threading.Lock()
        self._content = memoryview(b"")
        """Verified and not read yet."""
        self._partial = bytearray()
        """Of frames that have not arrived completely, as `receive_available` reads them."""

    def fileno(self) -> int:
        """The descriptor to select on."""
        return self._end.fileno()

    def settimeout(self, seconds: float | None) -> None:
        """How long a read or write may block."""
        self._end.settimeout(seconds)

    def getsockname(self) -> tuple[str, int]:
        """The address of this end."""
        host, port = self._end.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Close the connection."""
        self._end.close()

    # -- sending

    def sendall(self, content: bytes | bytearray | memoryview) -> None:
        """Send bytes, in as many frames as they need."""
        with self._lock, memoryview(content) as view, view.cast("B") as octets:
            for begin in range(0, len(octets), FRAME_BYTES):
                frame = octets[begin : begin + FRAME_BYTES]
                header = _LENGTH.pack(len(frame)) + _mac(self._send_key, self._sent, frame)
                self._sent += 1
                if len(frame) <= _SMALL_BYTES:
                    self._end.sendall(header + bytes(frame))
                else:
                    self._end.sendall(header)
                    self._end.sendall(frame)

    # -- receiving: never reads beyond a frame, except for `receive_available`

    def readline(self) -> bytes:
        """Read up to the next end of line."""
        line = bytearray()
        while True:
            if not self._content:
                self._content = memoryview(self._next_frame())
            rest = bytes(self._content)
            end = rest.find(b"\n") + 1
            line += rest[: end or len(rest)]
            self._content = self._content[end or len(rest) :]
            if end:
                return bytes(line)

    def fill(self, out: memoryview) -> None:
        """Fill `out`; if this raises, what is there may be anything."""
        while out:
            if not self._content:
                length, mac = self._next_header()
                if length <= len(out):  # straight to where it belongs
                    _fill(self._end, out[:length])
                    self._verify(out[:length], mac)
                    out = out[length:]
                    continue
                self._content = memoryview(self._frame(length, mac))
            count = min(len(out), len(self._content))
            out[:count] = self._content[:count]
            out, self._content = out[count:], self._content[count:]

    def receive_available(self) -> bytes | None:
        """Read once, and return the frames that are complete by now; None if the other end closed the connection."""
        received = self._end.recv(_READ_BYTES)
        if not received:
            return None
        self._partial += received
        contents = list[bytes]()
        while len(self._partial) >= _HEADER_BYTES:
            length = self._length(self._partial[: _LENGTH.size])
            if len(self._partial) < _HEADER_BYTES + length:
                break
            frame = bytes(self._partial[: _HEADER_BYTES + length])
            self._verify(frame[_HEADER_BYTES:], frame[_LENGTH.size : _HEADER_BYTES])
            contents.append(frame[_HEADER_BYTES:])
            del self._partial[: len(frame)]
        return b"".join(contents)

    def _next_frame(self) -> bytearray:
        return self._frame(*self._next_header())

    def _next_header(self) -> tuple[int, bytes]:
        header = bytearray(_HEADER_BYTES)
        _fill(self._end, memoryview(header))
        return self._length(header[: _LENGTH.size]), bytes(header[_LENGTH.size :])

    def _frame(self, length: int, mac: bytes) -> bytearray:
        content = bytearray(length)
        _fill(self._end, memoryview(content))
        self._verify(content, mac)
        return content

    def _length(self, header: bytes | bytearray) -> int:
        (length,) = _LENGTH.unpack(header)
        if not 0 < length <= FRAME_BYTES:
            raise self._rejected("its length is impossible")
        return int(length)

    def _verify(self, content: bytes | bytearray | memoryview, mac: bytes) -> None:
        if not hmac.compare_digest(_mac(self._receive_key, self._received, content), mac):
            raise self._rejected("its MAC or its place in the sequence is wrong")
        self._received += 1

    def _rejected(self, why: str) -> FrameRejected:
        peer = "the other end"
        with contextlib.suppress(OSError, IndexError):  # a pair of sockets has no addresses
            peer = str(self._end.getpeername()[0])
        text = f"rejected frame {self._received} from {peer}: {why}"
        print(text, file=sys.stderr, flush=True)
        return FrameRejected(text)


def _mac(key: bytes, number: int, content: bytes | bytearray | memoryview) -> bytes:
    prefix = _NUMBER.pack(number, len(content))
    if len(content) <= _SMALL_BYTES:
        return hmac.digest(key, prefix + bytes(content), "sha256")[:MAC_BYTES]
    state = hmac.new(key, prefix, "sha256")
    state.update(content)
    return state.digest()[:MAC_BYTES]


def _fill(end: socket.socket, out: memoryview) -> None:
    while out:
        count = end.recv_into(out)
        if not count:
            raise ConnectionError("the other end closed the connection")
        out = out[count:]
