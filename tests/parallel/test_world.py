"""Workers of several nodes meet at a port of the first node's address, and at no other."""

import socket
import threading

import psutil

from headway.parallel.world import _store
from headway.recipe import Assignment


def test_rendezvous_listens_on_the_address_of_the_node_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def assignment(rank: int) -> Assignment:
        place = {"run": "r", "attempt": 1, "workers": 2, "device": "cpu", "threads": 1, "log": "log"}
        return Assignment(**place, rank=rank, rendezvous=f"tcp://127.0.0.1:{port}", asked_ns=1)

    stores = []
    second = threading.Thread(target=lambda: stores.append(_store(assignment(1), 60.0)))
    second.start()
    first = _store(assignment(0), 60.0)
    second.join()
    sockets = [each for each in psutil.Process().net_connections() if each.laddr and each.laddr.port == port]
    assert [each.laddr.ip for each in sockets if each.status == "LISTEN"] == ["127.0.0.1"]
    assert {each.laddr.ip for each in sockets} == {"127.0.0.1"}
    first.set("key", "value")
    assert stores[0].get("key") == b"value"
