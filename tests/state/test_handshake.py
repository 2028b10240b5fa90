"""Two ends of a connection know each other by a key that never travels."""

import contextlib
import socket
import threading

import pytest

from headway.state.handshake import HandshakeFailed, client_handshake, new_key, server_handshake


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
