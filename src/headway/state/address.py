"""Checkpoint addresses: a folder, or `<URL of a run in an object store>/step-<n>`."""

import re
from pathlib import Path

from headway.errors import UsageError
from headway.recipe import Store
from headway.state.read_checkpoint import OpenCheckpoint, open_checkpoint

RUN_FILES = "folder"
"""Where a run's small files are under its URL."""
_IN_STORE = re.compile(r"([a-z][a-z0-9]*://.+)/step-(\d+)/?|([a-z][a-z0-9]*://[^/@]*/[^@]+)@(\d+)")


def is_in_store(address: str) -> bool:
    """Whether an address is in an object store."""
    return "://" in address


def address_in_store(url: str, step: int) -> str:
    """Return the address of a step's checkpoint under the URL of a run."""
    return f"{url}/step-{step:08d}"


def split_address(address: str) -> tuple[str, int | None]:
    """Split an address in a store into the run's, and the step that `/step-100` or `@100` names, if any."""
    match = _IN_STORE.fullmatch(address)
    return (address.rstrip("/"), None) if match is None else (match[1] or match[3], int(match[2] or match[4]))


def store_url(rules: Store, run: str) -> str:
    """Return the URL of a run's checkpoints in its object store."""
    return f"{rules.url.rstrip('/')}/{run}"


def open_address(address: str) -> OpenCheckpoint:
    """Open a checkpoint in a folder or an object store."""
    if not is_in_store(address):
        return open_checkpoint(Path(address))
    # Imported here: folders do not need the object store library.
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import StoreCheckpoint

    url, step = split_address(address)
    if step is None:
        open_store(address)  # raises if the URL itself is wrong, without repeating a password
        raise UsageError(f"{address} is not a checkpoint address", hint="for example s3://bucket/prefix/RUN/step-100")
    return open_checkpoint(StoreCheckpoint(open_store(url), step))
