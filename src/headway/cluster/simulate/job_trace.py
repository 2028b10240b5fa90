"""Job traces: CSV files with a line per job, in order of submission.

job_id, submit_s, duration_s, num_gpus                  required
vc (the tenant), user, deadline_s, limit_s              optional
kind, priority, preemptible, min_run_s, save_every_s,
restart_s, within, sizes (4:1 8:1.8)                    optional, the fields of a Job
"""

import csv
import difflib
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.jobs import KINDS, Job, check_sizes
from headway.errors import UsageError

REQUIRED, OPTIONAL = ("job_id", "submit_s", "duration_s", "num_gpus"), ("vc", "user", "deadline_s", "limit_s")
SIMILAR = 0.85
"""Similarity, of 1, at which a column name counts as misspelled."""
SECONDS, WHOLE = "a number of seconds from 0 to 1e9", "a whole number of GPUs, at least 1"
MAX_GPUS, MAX_SECONDS, MAX_PRIORITY = 2**31 - 1, 1e9, 10**9
BOOLEANS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
DEFAULT_TENANT = "all"


@dataclass(frozen=True)
class JobTrace:
    """Jobs in order of submission."""

    names: tuple[str, ...]
    submit_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    gpus: NDArray[np.int64]
    tenant: NDArray[np.int64]
    tenants: tuple[str, ...]
    limit_s: NDArray[np.float64]
    """NaN where the trace has none."""
    deadline_s: NDArray[np.float64]
    users: tuple[str, ...] = ()
    """User of each job, if the trace has them."""
    extra: tuple[Mapping[str, Any], ...] = ()
    """Other fields of each Job that the trace sets."""

    def __len__(self) -> int:
        return len(self.names)

    def only(self, kept: NDArray[np.bool_]) -> "JobTrace":
        """Return some of the jobs."""
        rows = np.flatnonzero(kept)
        return replace(
            self,
            names=tuple(self.names[row] for row in rows),
            submit_s=self.submit_s[rows],
            duration_s=self.duration_s[rows],
            gpus=self.gpus[rows],
            tenant=self.tenant[rows],
            limit_s=self.limit_s[rows],
            deadline_s=self.deadline_s[rows],
            users=tuple(self.users[row] for row in rows) if self.users else (),
            extra=tuple(self.extra[row] for row in rows) if self.extra else (),
        )

    def demand(self) -> NDArray[np.float64]:
        """Return the GPU-seconds of each tenant."""
        return np.bincount(self.tenant, self.duration_s * self.gpus, len(self.tenants)).astype(np.float64)


def apportion(exact: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Round to whole numbers that add up to a total: the largest remainders are rounded up."""
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: total - int(whole.sum())]] += 1
    return whole


def read_text(path: Path, expected: str) -> str:
    """Read a text file, gzipped or not; `expected` is what the hint says it should be."""
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}", hint=f"{expected}, gzipped or not") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def read_trace(path: Path) -> JobTrace:
    """Read a job trace; UsageError names the line of the first mistake."""
    reader = csv.DictReader(io.StringIO(read_text(path, "a CSV file of jobs")))
    check_columns(path, reader.fieldnames or (), REQUIRED, (*OPTIONAL, *EXTRA))
    try:
        rows = list(_rows(path, reader))
    except csv.Error as error:
        raise UsageError(f"{path}: line {reader.line_num + 1}: {error}") from None
    if not rows:
        raise UsageError(f"{path} has no jobs")
    names, submit_s, duration_s, gpus, tenant, limit_s, deadline_s, users, extra = zip(*rows, strict=True)
    tenants = tuple(sorted(set(tenant)))
    number = {name: i for i, name in enumerate(tenants)}
    return JobTrace(
        names,
        np.array(submit_s),
        np.array(duration_s),
        np.array(gpus, np.int64),
        np.array([number[name] for name in tenant], np.int64),
        tenants,
        np.array(limit_s),
        np.array(deadline_s),
        users,
        extra,
    )


def check_columns(path: Path, names: Sequence[str], required: Sequence[str], optional: Sequence[str]) -> None:
    """Raise UsageError for a missing, duplicate or misspelled column; other columns are ignored."""
    missing = [name for name in required if name not in names]
    if missing:
        raise UsageError(f"{path}: line 1 lacks {', '.join(missing)}", hint=f"required: {', '.join(required)}")
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UsageError(f"{path}: line 1 has column {name} twice")
        meant = difflib.get_close_matches(name.strip().lower(), [*required, *optional], 1, SIMILAR)
        if meant and name != meant[0] and meant[0] not in names:
            raise UsageError(f"{path}: line 1 has unknown column '{name}'", hint=f"did you mean {meant[0]}?")


def _rows(path: Path, reader: "csv.DictReader[str]") -> Iterator[tuple[Any, ...]]:
    """Yield the values of each job in the order of JobTrace, with the tenant's name."""
    seen, last = set[str](), -math.inf
    for line in reader:
        where = f"{path}: line {reader.line_num}"
        if None in line:
            raise UsageError(f"{where} has more values than line 1 has columns")
        name, tenant = _text(where, line, "job_id"), _text(where, line, "vc") or DEFAULT_TENANT
        submit_s, duration_s = read_number(where, line, "submit_s"), read_number(where, line, "duration_s")
        gpus, limit_s = _gpus(where, line), read_number(where, line, "limit_s", math.nan)
        deadline_s = read_number(where, line, "deadline_s", math.nan)
        extra = {key: read(where, line, key) for key, read in EXTRA.items() if _text(where, line, key)}
        if not name:
            raise UsageError(f"{where}: no job_id")
        if name in seen:
            raise UsageError(f"{where}: duplicate job '{name}'")
        if submit_s < last:
            raise UsageError(f"{where}: job {name} was submitted before the previous one", hint="sort by submit_s")
        if deadline_s <= submit_s:
            raise UsageError(f"{where}: job {name}: deadline_s is not after submit_s")
        if "sizes" in extra:
            try:
                check_sizes(Job(name, tenant, gpus, sizes=extra["sizes"]))
            except UsageError as error:
                raise UsageError(f"{where}: {error.message}", hint=error.hint) from None
        seen.add(name)
        last = submit_s
        yield name, submit_s, duration_s, gpus, tenant, limit_s, deadline_s, _text(where, line, "user"), extra


Line = Mapping[str, str | None]


def _text(_: str, line: Line, key: str) -> str:
    return (line.get(key) or "").strip()


def read_number(where: str, line: Line, key: str, missing: float | None = None, hint: str = SECONDS) -> float:
    """Return a column's number, or `missing` if it is empty; raise UsageError if it is not one, or out of range."""
    text = _text(where, line, key)
    if not text and missing is not None:
        return missing
    try:
        number = float(text)
    except ValueError:
        raise UsageError(f"{where}: {key} is {text!r}", hint=hint) from None
    if not 0 <= number <= MAX_SECONDS:
        raise UsageError(f"{where}: {key} is {text}", hint=hint)
    return number


def _gpus(where: str, line: Line) -> int:
    number = read_number(where, line, "num_gpus", hint=WHOLE)
    if number != int(number) or not 1 <= number <= MAX_GPUS:
        raise UsageError(f"{where}: num_gpus is {line['num_gpus']}", hint=WHOLE)
    return int(number)


def _one_of(values: Mapping[str, Any]) -> Callable[[str, Line, str], Any]:
    """Return a reader of words that stand for values."""

    def read(where: str, line: Line, key: str) -> Any:
        text = _text(where, line, key)
        if text.lower() not in values:
            raise UsageError(f"{where}: {key} is {text!r}", hint=f"one of {', '.join(values)}")
        return values[text.lower()]

    return read


def _priority(where: str, line: Line, key: str) -> int:
    text = _text(where, line, key)
    try:
        number = int(text)
    except ValueError:
        number = MAX_PRIORITY + 1
    if abs(number) > MAX_PRIORITY:
        raise UsageError(f"{where}: {key} is {text!r}", hint="a whole number up to a billion; higher goes first")
    return number


def _positive_seconds(where: str, line: Line, key: str) -> float:
    number = read_number(where, line, key)
    if not number:
        raise UsageError(f"{where}: {key} is {_text(where, line, key)}", hint="seconds, more than 0")
    return number


def _sizes(where: str, line: Line, key: str) -> tuple[tuple[int, float], ...]:
    text = _text(where, line, key)
    try:
        pairs = [pair.split(":") for pair in text.split()]
        return tuple((int(gpus), float(speed)) for gpus, speed in pairs)
    except ValueError:
        raise UsageError(f"{where}: {key} is {text!r}", hint="GPUs and speeds: 4:1 8:1.8") from None


EXTRA: Mapping[str, Callable[[str, Line, str], Any]] = {
    "kind": _one_of({kind: kind for kind in KINDS}),
    "priority": _priority,
    "preemptible": _one_of(BOOLEANS),
    "min_run_s": read_number,
    "save_every_s": _positive_seconds,
    "restart_s": read_number,
    "within": _text,
    "sizes": _sizes,
}
"""Readers of the columns that set further fields of a Job."""
