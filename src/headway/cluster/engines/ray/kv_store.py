"""What is written down of jobs on a Ray cluster: JSON in the cluster's own key-value store, a name each."""

from typing import Any

from pydantic_core import from_json, to_json

__all__ = ["RayKvStore"]

NAMESPACE = b"headway"


class RayKvStore:
    """The records of one user. Ray's store lives as long as its head node, or longer where that keeps it in Redis."""

    def __init__(self, user: str) -> None:
        from ray.experimental import internal_kv

        self._kv, self._user = internal_kv, user

    def put(self, kind: str, name: str, record: dict[str, Any]) -> None:
        """Write a record, in the place of one of that name."""
        self._kv._internal_kv_put(self._key(kind, name), to_json(record), overwrite=True, namespace=NAMESPACE)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """A record, if there is one."""
        found = self._kv._internal_kv_get(self._key(kind, name), namespace=NAMESPACE)
        return None if found is None else from_json(found)

    def remove(self, kind: str, name: str) -> None:
        """Forget a record."""
        self._kv._internal_kv_del(self._key(kind, name), namespace=NAMESPACE)

    def names(self, kind: str) -> list[str]:
        """The names of all records of a kind."""
        prefix = self._key(kind, "")
        return [key[len(prefix) :].decode() for key in self._kv._internal_kv_list(prefix, namespace=NAMESPACE)]

    def _key(self, kind: str, name: str) -> bytes:
        return f"{self._user}/{kind}/{name}".encode()
