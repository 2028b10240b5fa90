"""One service per folder, and where clients find it."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.cluster.engines.scripts import replace_file
from headway.cluster.service.connection import ADDRESS
from headway.errors import EngineError


@contextmanager
def only_service(folder: Path) -> Iterator[None]:
    """Be the only service of a folder; EngineError if there is one."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise EngineError(
                f"a service already runs for {folder.parent}: process {file.read().strip() or '?'}",
                hint="headway queue asks it; choose another folder with --runs",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def publish_address(folder: Path, url: str, fingerprint: str | None = None) -> None:
    """Write where the service listens, and the fingerprint of its certificate, for whoever may read the folder."""
    fields = {"format": 1, "url": url, "pid": os.getpid(), "fingerprint": fingerprint}
    replace_file(folder / ADDRESS, json.dumps(fields) + "\n")
