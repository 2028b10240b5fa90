"""Job records as JSON in the key-value store of a Ray cluster."""

from typing import Any

from pydantic_core import from_json, to_json

NAMESPACE = b"headway"


class RayKvStore:
    """The records of one user. Ray's store lives as long as its head node, or longer if that uses Redis."""

    def __init__(self, user: str) -> None:
        from ray.experimental import internal_kv

        self._kv, self._user = internal_kv, user

    def put(self, kind: str, name: str, record: dict[str, Any]) -> None:
        """Write or overwrite a record."""
        self._kv._internal_kv_put(self._key(kind, name), to_json(record), overwrite=True, namespace=NAMESPACE)

    def remove(self, kind: str, name: str) -> None:
        """Delete a record."""
        self._kv._internal_kv_del(self._key(kind, name), namespace=NAMESPACE)

    def read_all(self, kind: str) -> dict[str, dict[str, Any]]:
        """All records of a kind, by name."""
        prefix = self._key(kind, "")
        keys = self._kv._internal_kv_list(prefix, namespace=NAMESPACE)
        values = {key: self._kv._internal_kv_get(key, namespace=NAMESPACE) for key in keys}
        return {key[len(prefix) :].decode(): from_json(value) for key, value in values.items() if value is not None}

    def _key(self, kind: str, name: str) -> bytes:
        return f"{self._user}/{kind}/{name}".encode()
