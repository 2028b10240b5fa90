"""Logs of jobs: a CSV file with a line for each, in the order they were submitted.

job_id, submit_s, duration_s, num_gpus      must be there
vc (the tenant), user, deadline_s, limit_s  may be
"""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.errors import UsageError

__all__ = ["Trace", "read_text", "read_trace"]

NEEDED = ("job_id", "submit_s", "duration_s", "num_gpus")
SECONDS, WHOLE = "a number of seconds, neither negative nor above 1e10", "GPUs are counted in whole numbers, from 1 on"
MOST_GPUS, LONGEST_S = 2**31 - 1, 1e10
NOBODYS = "all"
"""The tenant of jobs whose log names none."""


@dataclass(frozen=True)
class Trace:
    """Jobs in the order they were submitted."""

    names: tuple[str, ...]
    submit_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    gpus: NDArray[np.int64]
    tenant: NDArray[np.int64]
    tenants: tuple[str, ...]
    limit_s: NDArray[np.float64]
    """NaN where the log has none."""
    deadline_s: NDArray[np.float64]
    users: tuple[str, ...] = ()
    """Of each job, where the log has them."""

    def __len__(self) -> int:
        return len(self.names)

    def demand(self) -> NDArray[np.float64]:
        """GPU-seconds of each tenant."""
        return np.bincount(self.tenant, self.duration_s * self.gpus, len(self.tenants)).astype(np.float64)


def read_text(path: Path, of: str) -> str:
    """A CSV file's, gzipped or not; `of` says what its lines are."""
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"there is no {path}", hint=f"a CSV file of {of}, gzipped or not") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def read_trace(path: Path) -> Trace:
    """UsageError names the line of the first mistake."""
    reader = csv.DictReader(io.StringIO(read_text(path, "jobs")))
    missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise UsageError(f"{path}: line 1 names no {', '.join(missing)}", hint=f"it must name {', '.join(NEEDED)}")
    try:
        rows = list(_rows(path, reader))
    except csv.Error as error:
        raise UsageError(f"{path}: line {reader.line_num + 1}: {error}") from None
    if not rows:
        raise UsageError(f"{path} has no jobs")
    names = tuple(row.name for row in rows)
    tenants = tuple(sorted({row.tenant for row in rows}))
    number = {name: i for i, name in enumerate(tenants)}
    return Trace(
        names,
        np.array([row.submit_s for row in rows]),
        np.array([row.duration_s for row in rows]),
        np.array([row.gpus for row in rows], np.int64),
        np.array([number[row.tenant] for row in rows], np.int64),
        tenants,
        np.array([row.limit_s for row in rows]),
        np.array([row.deadline_s for row in rows]),
        tuple(row.user for row in rows),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    submit_s: float
    duration_s: float
    gpus: int
    tenant: str
    limit_s: float
    deadline_s: float
    user: str


def _rows(path: Path, reader: "csv.DictReader[str]") -> Iterator[_Row]:
    seen, last = set[str](), -math.inf
    for line in reader:
        where = f"{path}: line {reader.line_num}"
        row = _Row(
            (line["job_id"] or "").strip(),
            _number(where, line, "submit_s"),
            _number(where, line, "duration_s"),
            _gpus(where, line),
            (line.get("vc") or "").strip() or NOBODYS,
            _number(where, line, "limit_s", math.nan),
            _number(where, line, "deadline_s", math.nan),
            (line.get("user") or "").strip(),
        )
        if not row.name:
            raise UsageError(f"{where}: a job without a job_id")
        if row.name in seen:
            raise UsageError(f"{where}: job {row.name} is named twice")
        if row.submit_s < last:
            raise UsageError(
                f"{where}: job {row.name} was submitted before the one above it", hint="sort the file by submit_s"
            )
        if row.deadline_s <= row.submit_s:
            raise UsageError(
                f"{where}: job {row.name} has its deadline_s before its submit_s", hint="both from one zero"
            )
        seen.add(row.name)
        last = row.submit_s
        yield row


def _number(
    where: str, line: Mapping[str, str | None], key: str, missing: float | None = None, hint: str = SECONDS
) -> float:
    text = (line.get(key) or "").strip()
    if not text and missing is not None:
        return missing
    try:
        number = float(text)
    except ValueError:
        raise UsageError(f"{where}: {key} is {text!r}", hint=hint) from None
    if not 0 <= number <= LONGEST_S:
        raise UsageError(f"{where}: {key} is {text}", hint=hint)
    return number


def _gpus(where: str, line: Mapping[str, str | None]) -> int:
    number = _number(where, line, "num_gpus", hint=WHOLE)
    if number != int(number) or not 1 <= number <= MOST_GPUS:
        raise UsageError(f"{where}: num_gpus is {line['num_gpus']}", hint=WHOLE)
    return int(number)
