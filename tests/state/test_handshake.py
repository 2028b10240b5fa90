"""Two ends of a connection know each other by a key that never travels."""

import contextlib
import socket
import threading

import pytest

from eventually import eventually
from headway.agent.nodes.snapshot_server import SnapshotServer
from headway.state.handshake import (
    MOST_PENDING,
    REFUSAL,
    ConnectionRefused,
    HandshakeFailed,
    PendingHandshakes,
    client_handshake,
    connect,
    new_key,
    server_handshake,
)
from headway.state.peer_read import peer_request


def meet(calls: str, listens: str) -> tuple[Exception | None, Exception | None]:
    """What each side makes of the other, over TCP on this machine."""
    errors: list[Exception | None] = [None, None]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            end, _ = server.accept()
            with contextlib.closing(end):
                try:
                    server_handshake(end, listens)
                except (HandshakeFailed, OSError) as error:
                    errors[1] = error

        thread = threading.Thread(target=listen)
        thread.start()
        with socket.create_connection(server.getsockname()) as end:
            try:
                client_handshake(end, calls)
            except (HandshakeFailed, OSError) as error:
                errors[0] = error
        thread.join()
    return errors[0], errors[1]


def test_the_same_key_lets_in_and_another_does_not() -> None:
    key = new_key()
    assert meet(key, key) == (None, None)
    caller, listener = meet(new_key(), key)
    assert isinstance(listener, HandshakeFailed)
    assert isinstance(caller, HandshakeFailed | OSError)
    assert new_key() != new_key()


def test_the_listener_must_know_the_key_too() -> None:
    """One that lets anybody in cannot make the caller believe it."""
    first, second = socket.socketpair()
    with first, second:
        second.sendall(bytes(32))

        def pretend() -> None:
            second.recv(64)
            second.sendall(bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(HandshakeFailed):
            client_handshake(first, "key")
        thread.join()


def test_the_key_does_not_travel_and_an_answer_cannot_be_used_again() -> None:
    key = new_key()
    seen = []
    for _ in range(2):
        first, second = socket.socketpair()
        with first, second:
            second.sendall(bytes(32))  # the same challenge twice
            thread = threading.Thread(target=lambda end=first: _ignore(end, key))
            thread.start()
            seen.append(second.recv(64))
            second.close()
            thread.join()
    assert key.encode() not in b"".join(seen)
    assert seen[0][32:] != seen[1][32:], "the caller's own number is in it"


def _ignore(end: socket.socket, key: str) -> None:
    with contextlib.suppress(HandshakeFailed, OSError):
        client_handshake(end, key)


def test_strangers_cannot_hold_more_than_a_bounded_number_of_connections(tmp_path, capfd) -> None:
    """A caller with the key gets in as soon as one of them is gone, and those that are in stay in."""
    key = new_key()
    server = SnapshotServer("127.0.0.1", key, tmp_path)
    address = ("127.0.0.1", server.port)
    with contextlib.closing(server), contextlib.closing(connect(address, key)) as early:
        eventually(lambda: not server._server.pending._counts)
        strangers = [socket.create_connection(address) for _ in range(MOST_PENDING)]
        assert all(len(stranger.recv(32)) == 32 for stranger in strangers), "each has a challenge"
        refused = socket.create_connection(address)
        with contextlib.closing(refused), pytest.raises(ConnectionRefused, match="too many unauthenticated"):
            client_handshake(refused, key)
        assert f"refusing connections of 127.0.0.1: {MOST_PENDING} of them" in capfd.readouterr().err
        assert peer_request(early, "lead") == {"hears": False}
        threading.Timer(0.05, strangers.pop().close).start()
        with contextlib.closing(connect(address, key)) as late:
            assert peer_request(late, "lead") == {"hears": False}
        for stranger in strangers:
            stranger.close()
        eventually(lambda: not server._server.pending._counts)


def test_other_addresses_are_unaffected() -> None:
    pending = PendingHandshakes(most=2)
    first, second = socket.socketpair()
    with first, second:
        assert [pending.admit(first, "10.0.0.1") for _ in range(3)] == [True, True, False]
        assert second.recv(64) == REFUSAL
        assert pending.admit(second, "10.0.0.2")
    pending.finish("10.0.0.1")
    third, fourth = socket.socketpair()
    with third, fourth:
        assert pending.admit(third, "10.0.0.1")


def test_a_byte_now_and_then_does_not_keep_a_handshake_open(monkeypatch) -> None:
    monkeypatch.setattr("headway.state.handshake.TIMEOUT_S", 0.2)
    first, second = socket.socketpair()
    with first, second:
        over = threading.Event()

        def drip() -> None:
            while not over.wait(0.02):
                second.send(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises((TimeoutError, HandshakeFailed)):
            server_handshake(first, "key")
        over.set()
        thread.join()
