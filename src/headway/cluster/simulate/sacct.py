"""Slurm's own account of its jobs, turned into a log that can be simulated.

    sacct --allusers --duplicates --parsable2 --starttime now-90days \\
          --format JobID,Submit,ElapsedRaw,ReqTRES,AllocTRES,Account,User,TimelimitRaw,State
"""

import csv
import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from headway.errors import UsageError

__all__ = ["SacctImport", "import_sacct"]

NEEDED = ("JobID", "Submit", "ElapsedRaw")
SAMPLE = (
    "sacct --parsable2 --allusers --format JobID,Submit,ElapsedRaw,ReqTRES,AllocTRES,Account,User,TimelimitRaw,State"
)
GPUS = re.compile(r"gres/gpu(?::[^=,]+)?=(\d+)")
UNFINISHED = ("PENDING", "RUNNING", "REQUEUED", "RESIZING", "SUSPENDED", "COMPLETING")


@dataclass(frozen=True)
class SacctImport:
    """What became of the lines of a file."""

    jobs: int
    without_gpus: int
    never_ran: int
    unfinished: int


@dataclass(frozen=True)
class _Line:
    name: str
    submit: datetime
    duration_s: int
    gpus: int
    tenant: str
    user: str
    limit_s: int | None


def import_sacct(source: Path, out: Path) -> SacctImport:
    """Write the jobs of sacct's output that had GPUs, ran and ended, as CSV; UsageError names a line that is wrong."""
    if out.exists():
        raise UsageError(f"{out} is there already", hint="remove it, or name another")
    try:
        content = source.read_bytes()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UsageError(f"{source} cannot be read: {error}") from None
    counts = {"without_gpus": 0, "never_ran": 0, "unfinished": 0}
    lines = sorted(_lines(source, text, counts), key=lambda line: (line.submit, line.name))
    if not lines:
        raise UsageError(
            f"{source} has no job that had GPUs, ran and ended", hint=f"{len(text.splitlines()) - 1} lines were read"
        )
    first = lines[0].submit
    try:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["job_id", "submit_s", "duration_s", "num_gpus", "vc", "user", "limit_s"])
            for line in lines:
                submit = int((line.submit - first).total_seconds())
                limit = "" if line.limit_s is None else line.limit_s
                writer.writerow([line.name, submit, line.duration_s, line.gpus, line.tenant, line.user, limit])
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from None
    return SacctImport(len(lines), **counts)


def _lines(source: Path, text: str, counts: dict[str, int]) -> Iterator[_Line]:
    reader = csv.DictReader(text.splitlines(), delimiter="|", quoting=csv.QUOTE_NONE)
    missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise UsageError(f"{source}: line 1 names no {', '.join(missing)}", hint=SAMPLE)
    if not {"ReqTRES", "AllocTRES"} & set(reader.fieldnames or ()):
        raise UsageError(f"{source}: line 1 names neither ReqTRES nor AllocTRES, which tell GPUs", hint=SAMPLE)
    seen = dict[str, int]()
    for row in reader:
        name = row["JobID"] or ""
        where = f"{source}: line {reader.line_num}"
        if None in row or None in row.values():
            raise UsageError(f"{where} has not as many values as line 1 has names", hint="was it cut off?")
        if "." in name:  # a step of a job
            continue
        gpus = GPUS.search(row.get("AllocTRES") or "") or GPUS.search(row.get("ReqTRES") or "")
        duration = _whole(where, "ElapsedRaw", row["ElapsedRaw"])
        if (row.get("State") or "").split(" ")[0] in UNFINISHED:
            counts["unfinished"] += 1
        elif gpus is None or int(gpus[1]) == 0:
            counts["without_gpus"] += 1
        elif duration == 0:
            counts["never_ran"] += 1
        else:
            seen[name] = seen.get(name, 0) + 1
            again = f"-{seen[name]}" if seen[name] > 1 else ""  # a job that was requeued has a line for each start
            minutes = row.get("TimelimitRaw") or ""
            yield _Line(
                name + again,
                _moment(where, row["Submit"] or ""),
                duration,
                int(gpus[1]),
                row.get("Account") or "",
                row.get("User") or "",
                int(minutes) * 60 if minutes.isdecimal() and int(minutes) else None,
            )


def _whole(where: str, key: str, text: str | None) -> int:
    if not (text or "").isdecimal():
        raise UsageError(f"{where}: {key} is {text!r}", hint="seconds, as sacct --parsable2 prints them")
    return int(text or 0)


def _moment(where: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{where}: Submit is {text!r}", hint="2026-01-31T23:59:59, as sacct prints it") from None
