"""Records that travel with a saved state, because they could not be written when it was saved.

A state must not outlive the record of its steps: a run that resumes from it would have a gap. While records cannot be
written (a full disk), every saved state carries what its workers and agent still have in memory. Whoever resumes from
the state, or outlives the workers that saved it, appends the rest to their files. The file of a record is always a
prefix of what was recorded, so that its size tells which part is missing.
"""

import base64
import os
import re
import zlib
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from headway.track.events import BACKLOG_BYTES, Recorder
from headway.track.run_folder import RunFolder

EXTRA = "records"
"""Their key in the `extra` facts of a checkpoint."""
_NAME = re.compile(r"\d{4,}-(agent|rank-\d+)\.jsonl")


class CarriedRecord(BaseModel):
    """The end of one record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    offset: int
    """Where it begins in the record's file."""
    data: str
    """Its lines, compressed, in base64."""

    @property
    def lines(self) -> bytes:
        """Its lines; at most as many as a recorder holds."""
        return zlib.decompressobj().decompress(base64.b64decode(self.data), 2 * BACKLOG_BYTES)


CarriedRecords = dict[str, CarriedRecord]
"""By the name of the record's file."""


def carry_record(recorder: Recorder) -> CarriedRecords:
    """Return what a recorder could not write yet; empty if it has written everything."""
    unwritten = recorder.unwritten()
    if unwritten is None:
        return {}
    data = base64.b64encode(zlib.compress(unwritten.lines, 1)).decode()
    return {recorder.path.name: CarriedRecord(offset=unwritten.offset, data=data)}


def dump_records(run: str, records: CarriedRecords) -> dict[str, object]:
    """Return carried records as `extra` facts of a checkpoint, with the id of their run; empty if there are none."""
    files = {name: record.model_dump() for name, record in records.items()}
    return {EXTRA: {"run": run, "files": files}} if files else {}


def parse_records(run: str, extra: Mapping[str, object]) -> CarriedRecords:
    """Return the records of this run that a checkpoint carries; those of another run are not for its folder."""
    carried = extra.get(EXTRA)
    if not isinstance(carried, dict) or carried.get("run") != run or not isinstance(carried.get("files"), dict):
        return {}
    try:
        return {
            name: CarriedRecord.model_validate(record)
            for name, record in carried["files"].items()
            if _NAME.fullmatch(name)
        }
    except ValidationError:
        return {}


def restore_records(run: RunFolder, records: CarriedRecords) -> CarriedRecords:
    """Append what is missing to the files of processes that have ended; return what cannot be written yet."""
    remaining: CarriedRecords = {}
    for name, record in records.items():
        try:
            file = os.open(run.events / name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            remaining[name] = record
            continue
        try:
            missing = _missing(file, record)
            while missing:
                missing = missing[os.write(file, missing) :]
        except OSError:
            remaining[name] = record
        finally:
            os.close(file)
    return remaining


def _missing(file: int, record: CarriedRecord) -> bytes:
    """Return what a record's file lacks of its end; nothing if it was continued with something else."""
    size, lines = os.fstat(file).st_size, record.lines
    if size < record.offset:  # more than this is missing; the rest is complete from the next line on
        return b"\n" + lines
    written = os.pread(file, max(0, size - record.offset), record.offset) if size > record.offset else b""
    return lines[len(written) :] if lines.startswith(written) else b""
