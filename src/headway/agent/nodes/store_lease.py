"""The right to lead a run whose machines see no common folder: numbered leases in its object store.

An object that must not be there yet is made by one alone, whoever hears whom. An agent takes the next lease when it
begins to lead, and puts checkpoints and records there only as long as no newer one is there. Those who join find its
address in it.
"""

import contextlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict

from headway.agent.nodes.lease import LeaseRecord
from headway.errors import HeadwayError, RunError, StateError
from headway.state.object_store import ObjectStore, open_store
from headway.state.store_checkpoint import claim_prefix
from headway.track import RunFolder, run_id

__all__ = ["StoreLease", "leader_finder", "lease_in_store"]

FOLDER = "leases"
PATIENCE_S = 10.0
LOOK_S = 2.0
"""Between two looks for a newer lease; before each commit there is another one."""
_KEY = re.compile(rf"{FOLDER}/(\d{{6,}})\.json")


def lease_in_store(url: str, patience_s: float = PATIENCE_S) -> LeaseRecord | None:
    """Who leads a run, as its store says; None before the first."""
    return _newest(open_store(url, patience_s=patience_s))


class StoreLease:
    """What an agent has that leads such a run."""

    def __init__(self, run: RunFolder, url: str, number: int = 0) -> None:
        """`number` is that of a lease that this agent's predecessor had taken here; 0 takes one with `begin`."""
        self._run, self._url, self._store = run, url, open_store(url, patience_s=PATIENCE_S)
        self.number = number
        self.overtaken = False
        """Whether another agent leads, by the last look."""
        self._ended = threading.Event()
        if number:
            self._look_on()

    def begin(self, lead: str, host: str, port: int) -> None:
        """Take the next lease, whoever had the last; RunError where another agent does so at this instant."""
        store = open_store(self._url)  # with patience: without the lease nothing begins
        if not claim_prefix(store, run_id(self._run)):
            raise RunError(f"{self._url} has checkpoints of another run of this name", hint="another --name")
        newest = _newest(store)
        number = 1 if newest is None else newest.number + 1
        lease = json.dumps(asdict(LeaseRecord(number, lead, host, port))).encode()
        if not store.create(f"{FOLDER}/{number:06d}.json", lease):
            raise RunError(f"another agent has begun to lead run {self._run.name}", hint=f"{self._url} tells which")
        self.number = number
        self._look_on()

    def holds(self) -> bool:
        """Whether this agent still leads, asked now; False too where the store does not say."""
        try:
            return self.number > 0 and max(_numbers(self._store)) == self.number
        except (StateError, ValueError):
            return False

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def _look_on(self) -> None:
        threading.Thread(target=self._look, name="witness", daemon=True).start()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S) and not self.overtaken:
            with contextlib.suppress(StateError):  # a store that does not answer has nothing to say
                self.overtaken = max(_numbers(self._store), default=0) > self.number


def leader_finder(url: str) -> Callable[[], tuple[str, int] | None]:
    """Finds out who leads, as often as asked; None where nobody does, or the store does not say."""
    store = open_store(url, patience_s=PATIENCE_S)

    def find() -> tuple[str, int] | None:
        with contextlib.suppress(HeadwayError):
            lease = _newest(store)
            if lease is not None and lease.port:
                return lease.host, lease.port
        return None

    return find


def _numbers(store: ObjectStore) -> list[int]:
    return [int(match[1]) for item in store.list(FOLDER) if (match := _KEY.fullmatch(item.key))]


def _newest(store: ObjectStore) -> LeaseRecord | None:
    number = max(_numbers(store), default=None)
    if number is None:
        return None
    content = store.find(f"{FOLDER}/{number:06d}.json") or b""
    try:
        return LeaseRecord(**json.loads(content))
    except (ValueError, TypeError):
        return LeaseRecord(number, "", "", 0)
