"""The socket of every server."""

import asyncio
import socket

from headway.http_server import listen


def test_answers_are_sent_at_once() -> None:
    """Nagle's algorithm would hold the second part of an answer back until the client confirms the first: 40 ms."""

    async def accepted() -> int:
        connected = asyncio.get_running_loop().create_future()

        class Connection(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                here = transport.get_extra_info("socket")
                connected.set_result(here.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        listener = listen("127.0.0.1", 0)
        async with await asyncio.get_running_loop().create_server(Connection, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            delay_off: int = await connected
            writer.close()
        return delay_off

    assert asyncio.run(accepted()) != 0
