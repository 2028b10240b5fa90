"""Packs a folder of code for the service, which hands it to the nodes of a job: same files, same archive."""

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

from headway.cluster.submit.provenance import sources
from headway.errors import UsageError

MOST_BYTES = 15 * 2**20
"""Of an archive: a request to the service may have little more."""


def pack_folder(folder: Path) -> tuple[str, bytes]:
    """The files of a folder, without hidden and compiled ones, as an archive, and its SHA-256."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in sources(folder):
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size = path.stat().st_size
            entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            with path.open("rb") as file:
                archive.addfile(entry, file)
            if packed.tell() > MOST_BYTES:
                raise UsageError(
                    f"{folder} has more than {MOST_BYTES // 2**20} MiB when packed: too large to upload",
                    hint="move data out of the folder; hidden files are left out",
                )
    data = packed.getvalue()
    return hashlib.sha256(data).hexdigest(), data
