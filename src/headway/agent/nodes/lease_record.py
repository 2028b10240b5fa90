"""The content of a leader lease, in the run's folder or in its object store."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class LeaseRecord:
    """Makes an agent the leader of a run, until there is a newer one."""

    number: int
    lead: str
    """The leader's name."""
    host: str
    port: int
    """Where the leader listens for the other agents."""

    def encode(self) -> bytes:
        """The record as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, number: int, content: bytes) -> "LeaseRecord":
        """Read a record; one that was just created and is not written yet has no address."""
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return cls(number, "", "", 0)
