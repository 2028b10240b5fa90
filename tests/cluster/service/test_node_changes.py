"""Nodes that wait for changes: who is woken by what, with times that no test waits for."""

import asyncio
import threading

from headway.cluster.service.node_changes import NodeChanges

LONG_S = 3600.0


async def waiting(changes: NodeChanges, *nodes: str) -> list[asyncio.Task[None]]:
    """Waits that have begun."""
    tasks = [asyncio.create_task(changes.wait(node, changes.version(node), LONG_S)) for node in nodes]
    await asyncio.sleep(0)
    return tasks


def test_a_change_wakes_its_nodes_only_and_one_for_all_the_others_too() -> None:
    async def run() -> None:
        changes = NodeChanges()
        first, second = await waiting(changes, "a", "b")
        threading.Thread(target=changes.note, args=(("a",),)).start()
        await first
        assert not second.done()
        changes.note()
        await second

    asyncio.run(run())


def test_who_missed_a_change_does_not_wait() -> None:
    async def run() -> None:
        changes = NodeChanges()
        version = changes.version("a")
        changes.note(("a",))
        await changes.wait("a", version, LONG_S)
        assert changes.version("a") > version

    asyncio.run(run())


def test_a_wait_ends_with_its_time() -> None:
    async def run() -> None:
        changes = NodeChanges()
        version = changes.version("a")
        await changes.wait("a", version, 0.01)
        assert changes.version("a") == version

    asyncio.run(run())


def test_nobody_waits_for_a_service_that_ends() -> None:
    async def run() -> None:
        changes = NodeChanges()
        tasks = await waiting(changes, "a", "b")
        changes.close()
        await asyncio.gather(*tasks)
        await changes.wait("a", changes.version("a"), LONG_S)

    asyncio.run(run())
