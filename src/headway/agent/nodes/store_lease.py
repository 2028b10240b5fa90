"""Leader leases in a run's object store, for machines that share no folder.

Conditional creation of an object succeeds for one agent only. An agent takes the next numbered lease when it begins to
lead, and writes checkpoints and records to the store only as long as there is no newer one. Other agents read the
leader's address from it.
"""

import contextlib
import re
import threading
from collections.abc import Callable

from headway.agent.nodes.lease import ANOTHER_LEADS
from headway.agent.nodes.lease_record import LeaseRecord
from headway.errors import HeadwayError, RunError, StateError
from headway.state.object_store import ObjectStore, open_store
from headway.state.store_checkpoint import claim_prefix
from headway.track import RunFolder, run_id

FOLDER = "leases"
PATIENCE_S = 10.0
CHECK_S = 2.0
"""Between two checks for a newer lease; each commit checks again."""
_KEY = re.compile(rf"{FOLDER}/(\d{{6,}})\.json")


def lease_in_store(url: str, patience_s: float = PATIENCE_S) -> LeaseRecord | None:
    """The newest lease of a run in its store; None before the first."""
    return _newest(open_store(url, patience_s=patience_s))


class StoreLease:
    """The lease of this agent, which leads."""

    def __init__(self, run: RunFolder, url: str, number: int = 0) -> None:
        """`number` is the lease that this agent's predecessor took on this machine; 0 if `begin` takes one."""
        self._run, self._url, self._store = run, url, open_store(url, patience_s=PATIENCE_S)
        self.number = number
        self.superseded = False
        """Whether another agent led at the last check."""
        self._closed = threading.Event()
        if number:
            self._start_checks()

    def begin(self, lead: str, host: str, port: int) -> None:
        """Take the next lease, whoever had the last; raise RunError if another agent takes it first."""
        store = open_store(self._url)  # with the default patience: without a lease nothing can start
        if not claim_prefix(store, run_id(self._run)):
            raise RunError(f"{self._url} has checkpoints of another run of this name", hint="choose another --name")
        newest = _newest(store)
        number = 1 if newest is None else newest.number + 1
        lease = LeaseRecord(number, lead, host, port).encode()
        if not store.create(f"{FOLDER}/{number:06d}.json", lease):
            raise RunError(
                f"another agent has begun to lead run {self._run.name}", hint=f"its lease is in {self._url}/{FOLDER}"
            )
        self.number = number
        self._start_checks()

    def holds(self) -> bool:
        """Check now whether this agent still leads; False if the store does not answer."""
        return self.refusal() is None

    def refusal(self) -> str | None:
        """Why this agent may not write to the store; None if it leads for certain."""
        try:
            newest = max(_numbers(self._store), default=0)
        except StateError as error:
            return f"its leader lease cannot be read: {error.message}"
        if newest > self.number:
            return ANOTHER_LEADS
        return None if newest == self.number and self.number > 0 else "its leader lease is gone"

    def close(self) -> None:
        """Stop checking."""
        self._closed.set()

    def _start_checks(self) -> None:
        threading.Thread(target=self._check, name="store-lease", daemon=True).start()

    def _check(self) -> None:
        while not self._closed.wait(CHECK_S) and not self.superseded:
            with contextlib.suppress(StateError):  # the store does not answer: nothing is known
                self.superseded = max(_numbers(self._store), default=0) > self.number


def leader_finder(url: str) -> Callable[[], tuple[str, int] | None]:
    """A function that returns the leader's address; None if there is none, or the store does not answer."""
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
    return LeaseRecord.decode(number, store.find(f"{FOLDER}/{number:06d}.json") or b"")
