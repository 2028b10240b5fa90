"""Which model, inputs and settings an answer came from: answers in a file are taken over only where these agree."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def fingerprint_of(**facts: Any) -> str:
    """Return a hash of what answers or scores depend on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def model_identity(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a model's files are, and when they last changed (ns); of one in a store, the step that is read."""
    folder, store = source.get("folder") or source.get("checkpoint"), source.get("store")
    if store is not None:
        return {**source, "changed": _step_in_store(str(store))}
    if folder is None:
        return {**source, "changed": 0}
    files = (path for path in Path(folder).glob("*") if path.is_file())
    return {**source, "changed": max((path.stat().st_mtime_ns for path in files), default=0)}


def _step_in_store(address: str) -> int:
    """Return the step that an address names, or else the newest."""
    from headway.state.address import split_address
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import list_remote

    url, step = split_address(address)
    return step if step is not None else max((entry.step for entry in list_remote(open_store(url))), default=0)
