"""Import of Slurm's sacct output as a job trace.

    sacct --allusers --duplicates --parsable2 --starttime now-90days \\
          --format JobID,Submit,ElapsedRaw,ReqTRES,AllocTRES,Account,User,TimelimitRaw,State
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from pathlib import Path

from headway.cluster.simulate.job_trace import read_text
from headway.errors import UsageError

NEEDED = ("JobID", "Submit", "ElapsedRaw")
SAMPLE = (
    "sacct --parsable2 --allusers --format JobID,Submit,ElapsedRaw,ReqTRES,AllocTRES,Account,User,TimelimitRaw,State"
)
GPUS = re.compile(r"gres/gpu(?::[^=,]+)?=(\d+)")
UNFINISHED = ("PENDING", "RUNNING", "REQUEUED", "RESIZING", "SUSPENDED", "COMPLETING")


@dataclass(frozen=True)
class SacctImport:
    """How many jobs of a file were imported, and how many were left out and why."""

    jobs: int
    without_gpus: int
    never_ran: int
    unfinished: int


def import_sacct(source: Path, out: Path) -> SacctImport:
    """Write the GPU jobs of sacct's output that ran and ended as CSV; UsageError names the line of a mistake."""
    if out.exists():
        raise UsageError(f"{out} already exists", hint="remove it, or choose another name")
    text = read_text(source, "what sacct --parsable2 prints")
    counts = {"without_gpus": 0, "never_ran": 0, "unfinished": 0}
    lines = sorted(_lines(source, text, counts), key=itemgetter(0, 1))
    if not lines:
        raise UsageError(f"{source}: none of {len(text.splitlines()) - 1} lines is a GPU job that ran and ended")
    first = lines[0][0]
    try:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["job_id", "submit_s", "duration_s", "num_gpus", "vc", "user", "limit_s"])
            for submit, name, *values in lines:
                writer.writerow([name, int((submit - first).total_seconds()), *values])
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
    return SacctImport(len(lines), **counts)


def _lines(
    source: Path, text: str, counts: dict[str, int]
) -> Iterator[tuple[datetime, str, int, int, str, str, int | str]]:
    """Yield submit time, name, run time, GPUs, account, user and time limit of the jobs to import; count others."""
    reader = csv.DictReader(text.splitlines(), delimiter="|", quoting=csv.QUOTE_NONE)
    missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise UsageError(f"{source}: line 1 lacks {', '.join(missing)}", hint=SAMPLE)
    if not {"ReqTRES", "AllocTRES"} & set(reader.fieldnames or ()):
        raise UsageError(f"{source}: line 1 has neither ReqTRES nor AllocTRES, which list GPUs", hint=SAMPLE)
    starts = dict[str, int]()
    for row in reader:
        name = row["JobID"] or ""
        where = f"{source}: line {reader.line_num}"
        if None in row or None in row.values():
            raise UsageError(f"{where} does not have as many values as line 1", hint="the file may be truncated")
        if "." in name:  # a step of a job
            continue
        gpus = GPUS.search(row.get("AllocTRES") or "") or GPUS.search(row.get("ReqTRES") or "")
        if not (row["ElapsedRaw"] or "").isdecimal():
            raise UsageError(
                f"{where}: ElapsedRaw is {row['ElapsedRaw']!r}", hint="seconds, as sacct --parsable2 prints"
            )
        duration = int(row["ElapsedRaw"])
        if (row.get("State") or "").split(" ")[0] in UNFINISHED:
            counts["unfinished"] += 1
        elif gpus is None or int(gpus[1]) == 0:
            counts["without_gpus"] += 1
        elif duration == 0:
            counts["never_ran"] += 1
        else:
            starts[name] = starts.get(name, 0) + 1
            suffix = f"-{starts[name]}" if starts[name] > 1 else ""  # a requeued job has a line per start
            minutes = row.get("TimelimitRaw") or ""
            yield (
                _time(where, row["Submit"] or ""),
                name + suffix,
                duration,
                int(gpus[1]),
                row.get("Account") or "",
                row.get("User") or "",
                int(minutes) * 60 if minutes.isdecimal() and int(minutes) else "",
            )


def _time(where: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{where}: Submit is {text!r}", hint="2026-01-31T23:59:59, as sacct prints it") from None
