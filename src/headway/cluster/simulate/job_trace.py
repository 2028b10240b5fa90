"""Logs of jobs: a CSV file with a line for each, in the order they were submitted.

job_id, submit_s, duration_s, num_gpus                  must be there
vc (the tenant), user, deadline_s, limit_s              may be
kind, priority, preemptible, min_run_s, save_every_s,
restart_s, within, sizes (4:1 8:1.8)                    may be, as a Job has them
"""

import csv
import difflib
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.jobs import KINDS, Job, check_sizes
from headway.errors import UsageError

__all__ = ["JobTrace", "check_columns", "read_number", "read_text", "read_trace"]

NEEDED, MORE = ("job_id", "submit_s", "duration_s", "num_gpus"), ("vc", "user", "deadline_s", "limit_s")
NEARLY = 0.85
"""How alike two names of columns are, of one, that one is taken for the other misspelt."""
SECONDS, WHOLE = "a number of seconds, neither negative nor above 1e9", "GPUs are counted in whole numbers, from 1 on"
MOST_GPUS, LONGEST_S = 2**31 - 1, 1e9
MOST_PRIORITY = 10**9
ANSWERS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
NOBODYS = "all"
"""The tenant of jobs whose log names none."""


@dataclass(frozen=True)
class JobTrace:
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
    asked: tuple[Mapping[str, Any], ...] = ()
    """Of each job what else the log says of it, by the names that a Job has for it."""

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


def read_trace(path: Path) -> JobTrace:
    """UsageError names the line of the first mistake."""
    reader = csv.DictReader(io.StringIO(read_text(path, "jobs")))
    check_columns(path, reader.fieldnames or (), NEEDED, (*MORE, *ASKED))
    try:
        rows = list(_rows(path, reader))
    except csv.Error as error:
        raise UsageError(f"{path}: line {reader.line_num + 1}: {error}") from None
    if not rows:
        raise UsageError(f"{path} has no jobs")
    names = tuple(row.name for row in rows)
    tenants = tuple(sorted({row.tenant for row in rows}))
    number = {name: i for i, name in enumerate(tenants)}
    return JobTrace(
        names,
        np.array([row.submit_s for row in rows]),
        np.array([row.duration_s for row in rows]),
        np.array([row.gpus for row in rows], np.int64),
        np.array([number[row.tenant] for row in rows], np.int64),
        tenants,
        np.array([row.limit_s for row in rows]),
        np.array([row.deadline_s for row in rows]),
        tuple(row.user for row in rows),
        tuple(row.asked for row in rows),
    )


def check_columns(path: Path, named: Sequence[str], needed: Sequence[str], known: Sequence[str]) -> None:
    """UsageError for a first line that lacks a column, has one twice, or one that is nearly another's name.

    Others may be there, which a log has for other readers.
    """
    missing = [name for name in needed if name not in named]
    if missing:
        raise UsageError(f"{path}: line 1 names no {', '.join(missing)}", hint=f"it must name {', '.join(needed)}")
    for number, name in enumerate(named):
        if name in named[:number]:
            raise UsageError(f"{path}: line 1 names {name} twice")
        meant = difflib.get_close_matches(name.strip().lower(), [*needed, *known], 1, NEARLY)
        if meant and name != meant[0] and meant[0] not in named:
            raise UsageError(f"{path}: line 1 names {name!r}, which nothing reads", hint=f"{meant[0]}, or another name")


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
    asked: Mapping[str, Any]


def _rows(path: Path, reader: "csv.DictReader[str]") -> Iterator[_Row]:
    seen, last = set[str](), -math.inf
    for line in reader:
        where = f"{path}: line {reader.line_num}"
        if None in line:
            raise UsageError(f"{where} has more values than line 1 has names")
        row = _Row(
            (line["job_id"] or "").strip(),
            read_number(where, line, "submit_s"),
            read_number(where, line, "duration_s"),
            _gpus(where, line),
            (line.get("vc") or "").strip() or NOBODYS,
            read_number(where, line, "limit_s", math.nan),
            read_number(where, line, "deadline_s", math.nan),
            (line.get("user") or "").strip(),
            {key: read(where, line, key) for key, read in ASKED.items() if (line.get(key) or "").strip()},
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
        if "sizes" in row.asked:
            _check_sizes(where, row)
        seen.add(row.name)
        last = row.submit_s
        yield row


Line = Mapping[str, str | None]


def read_number(where: str, line: Line, key: str, missing: float | None = None, hint: str = SECONDS) -> float:
    """Of a line's column; UsageError names it. `missing` is what an empty one means."""
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


def _gpus(where: str, line: Line) -> int:
    number = read_number(where, line, "num_gpus", hint=WHOLE)
    if number != int(number) or not 1 <= number <= MOST_GPUS:
        raise UsageError(f"{where}: num_gpus is {line['num_gpus']}", hint=WHOLE)
    return int(number)


def _text(_: str, line: Line, key: str) -> str:
    return (line[key] or "").strip()


def _one_of(known: Mapping[str, Any]) -> Callable[[str, Line, str], Any]:
    """Reads a word that stands for something."""

    def read(where: str, line: Line, key: str) -> Any:
        text = _text(where, line, key)
        if text.lower() not in known:
            raise UsageError(f"{where}: {key} is {text!r}", hint=f"one of {', '.join(known)}")
        return known[text.lower()]

    return read


def _priority(where: str, line: Line, key: str) -> int:
    text = _text(where, line, key)
    try:
        number = int(text)
    except ValueError:
        number = MOST_PRIORITY + 1
    if abs(number) > MOST_PRIORITY:
        raise UsageError(f"{where}: {key} is {text!r}", hint="a whole number, a billion at most; higher ones go first")
    return number


def _some_seconds(where: str, line: Line, key: str) -> float:
    number = read_number(where, line, key)
    if not number:
        raise UsageError(f"{where}: {key} is {_text(where, line, key)}", hint="seconds, more than none")
    return number


def _sizes(where: str, line: Line, key: str) -> tuple[tuple[int, float], ...]:
    text = _text(where, line, key)
    try:
        pairs = [pair.split(":") for pair in text.split()]
        return tuple((int(gpus), float(speed)) for gpus, speed in pairs)
    except ValueError:
        raise UsageError(f"{where}: {key} is {text!r}", hint="GPUs and speeds: 4:1 8:1.8") from None


def _check_sizes(where: str, row: _Row) -> None:
    try:
        check_sizes(Job(row.name, row.tenant, row.gpus, sizes=row.asked["sizes"]))
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from None


ASKED: Mapping[str, Callable[[str, Line, str], Any]] = {
    "kind": _one_of({kind: kind for kind in KINDS}),
    "priority": _priority,
    "preemptible": _one_of(ANSWERS),
    "min_run_s": read_number,
    "save_every_s": _some_seconds,
    "restart_s": read_number,
    "within": _text,
    "sizes": _sizes,
}
"""How columns are read that say more of a job."""
