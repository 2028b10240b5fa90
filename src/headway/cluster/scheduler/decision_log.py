"""Log of what a scheduler saw and decided, from which every decision can be replayed.

A decision log is a gzipped file of JSON lines: the cluster and the policy first, then each event (a job arrived or
ended, a node failed) and each cycle with its decisions. Nothing else changes a ClusterSnapshot, so reading the log
restores it at any time, and each cycle can be decided again and compared. The last line has the number of lines and a
checksum, which reveals a truncated or modified log.
"""

import gzip
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import xxhash

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decisions import Decision, Reason, ReasonCode
from headway.cluster.scheduler.history import JobHistory
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.placement import Placement
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.errors import UsageError

FORMAT = 1


def record_of(folder: Path, policy: str) -> Path:
    """Return the path of a policy's decision log."""
    return folder / f"{policy}.jsonl.gz"


def policies_in(folder: Path) -> list[str]:
    """Return the policies that a folder has decision logs of; raise UsageError if there are none."""
    policies = sorted(path.name.removesuffix(".jsonl.gz") for path in folder.glob("*.jsonl.gz"))
    if not policies:
        raise UsageError(f"{folder} has no decision logs", hint="write some with headway simulate --record DIR")
    return policies


class DecisionRecorder:
    """Writes a decision log."""

    def __init__(self, path: Path, snapshot: ClusterSnapshot, policy: Policy) -> None:
        self._file: TextIO = gzip.open(path, "wt", encoding="utf-8", compresslevel=3)  # noqa: SIM115 (until `close`)
        self._sum, self._count = xxhash.xxh3_64(), 0
        self._write({"format": FORMAT, "policy": policy.name, "cluster": json.loads(snapshot.to_json())})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._file.write(text)
        self._sum.update(text.encode())
        self._count += 1

    def submitted(self, now: float, job: Job, known_s: float = math.nan) -> None:
        """Record a submitted job."""
        known = {} if math.isnan(known_s) else {"known_s": known_s}
        request = {key: "inf" if value == math.inf else value for key, value in asdict(job).items()}
        self._write({"at": now, "job": request} | known)

    def ended(self, now: float, name: str) -> None:
        """Record a finished job."""
        self._write({"at": now, "end": name})

    def failed(self, now: float, node: str) -> None:
        """Record a failed node."""
        self._write({"at": now, "fail": node})

    def repaired(self, now: float, node: str, state: int) -> None:
        """Record a repaired node."""
        self._write({"at": now, "mend": node, "state": state})

    def decided(self, now: float, snapshot: ClusterSnapshot, decisions: Sequence[Decision]) -> None:
        """Record a cycle; `snapshot` is the one before the decisions are applied."""
        self._write({"at": now, "decided": [_encode(snapshot, decision) for decision in decisions]})

    def close(self) -> None:
        """Finish the log."""
        self._file.write(json.dumps({"lines": self._count, "sum": self._sum.hexdigest()}) + "\n")
        self._file.close()


def _encode(snapshot: ClusterSnapshot, decision: Decision) -> list[Any]:
    """Return a decision as JSON values, with the job's name in place of its row."""
    place = [decision.pool, decision.placement.nodes.tolist(), decision.placement.gpus.tolist()]
    numbers = [list(pair) for pair in decision.reason.numbers]
    return [decision.kind, snapshot.jobs.names[decision.job], place, decision.at_s, decision.reason.code, numbers]


def _decode(snapshot: ClusterSnapshot, encoded: Sequence[Any]) -> Decision:
    """Return the decision that `_encode` wrote."""
    kind, name, (pool, nodes, gpus), at_s, code, numbers = encoded
    placement = Placement(np.array(nodes, np.int32), np.array(gpus, np.int32))
    reason = Reason(ReasonCode(code), tuple((key, value) for key, value in numbers))
    return Decision(kind, snapshot.jobs.rows[name], pool, placement, reason, at_s)


def apply_decisions(snapshot: ClusterSnapshot, decisions: Iterable[Decision]) -> None:
    """Apply decisions to a snapshot at its own time: stops first, then the others in order."""
    decisions = list(decisions)
    stops = [decision.job for decision in decisions if decision.kind == "stop"]
    if stops:
        snapshot.stop(stops)
    for decision in decisions:
        if decision.kind == "move":
            snapshot.move(decision.job)
        elif decision.kind == "start":
            snapshot.start(decision.job, decision.pool, decision.placement)
        elif decision.kind == "resize":
            snapshot.resize(decision.job, decision.pool, decision.placement)


@dataclass(frozen=True)
class DecisionMismatch:
    """The first cycle that is decided differently today."""

    at_s: float
    cycle: int
    recorded: tuple[Any, ...]
    """The first recorded decision that differs; empty if there was none."""
    today: tuple[Any, ...]


def replay(path: Path) -> Iterator[DecisionMismatch | None]:
    """Decide every recorded cycle again: yield None for each equal one, and stop after the first that differs."""
    number = 0
    for _, snapshot, policy, line in _lines(path):
        if "decided" not in line:
            continue
        decisions = decide(snapshot, line["at"], policy)
        today = json.loads(json.dumps([_encode(snapshot, decision) for decision in decisions]))
        if today != line["decided"]:
            pairs = zip_longest(line["decided"], today, fillvalue=())
            recorded, now = next(pair for pair in pairs if pair[0] != pair[1])
            yield DecisionMismatch(line["at"], number, tuple(recorded), tuple(now))
            return
        apply_decisions(snapshot, decisions)
        number += 1
        yield None


class PastState(NamedTuple):
    """What was known at a time."""

    snapshot: ClusterSnapshot
    policy: Policy
    history: JobHistory
    decided: bool
    """Whether the last line was a cycle."""


def replay_until(path: Path, until_s: float = math.inf) -> Iterator[PastState]:
    """Yield the state after each line until a time; all states share one snapshot, which is updated in place."""
    for history, snapshot, policy, line in _lines(path, until_s):
        if "decided" in line:
            apply_decisions(snapshot, [_decode(snapshot, encoded) for encoded in line["decided"]])
        yield PastState(snapshot, policy, history, "decided" in line)


def state_at(path: Path, at_s: float) -> PastState:
    """Return the state after everything that happened until a time."""
    states = deque(replay_until(path, at_s), maxlen=1)
    if not states:
        raise UsageError(f"nothing had happened at {at_s:.0f} s", hint="choose a later second with --at")
    return states[0]


def job_times(path: Path, job: str) -> tuple[float | None, float | None]:
    """Return when a job was submitted and when it ended; None if the log does not have it."""
    submitted = ended = None
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in map(json.loads, file):
            submitted = line["at"] if line.get("job", {}).get("name") == job else submitted
            ended = line["at"] if line.get("end") == job else ended
    return submitted, ended


def _lines(
    path: Path, until_s: float = math.inf
) -> Iterator[tuple[JobHistory, ClusterSnapshot, Policy, dict[str, Any]]]:
    """Yield each line until a time with the snapshot after its event; a cycle's decisions are not applied."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            first = next(file, "{}")
            head, total, count = json.loads(first), xxhash.xxh3_64(first.encode()), 1
            if not isinstance(head, dict) or head.get("format") != FORMAT or head.get("policy") not in POLICIES:
                raise UsageError(f"{path} is not a decision log of a known format and policy")
            snapshot, policy = ClusterSnapshot.from_json(json.dumps(head["cluster"])), POLICIES[head["policy"]]
            history = JobHistory()
            for text in file:
                line = json.loads(text)
                if "sum" in line:
                    if (line["lines"], line["sum"]) != (count, total.hexdigest()):
                        raise UsageError(f"{path} was modified after it was written", hint="record it again")
                    return
                if line["at"] > until_s:
                    return
                total.update(text.encode())
                count += 1
                _apply_event(snapshot, history, line)
                yield history, snapshot, policy, line
        raise UsageError(f"{path} is truncated: its writer did not finish", hint="record it again")
    except (FileNotFoundError, IsADirectoryError):
        raise UsageError(f"no decision log {path}", hint="write one with headway simulate --record DIR") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a decision log, or damaged: {error}") from None


def _apply_event(snapshot: ClusterSnapshot, history: JobHistory, line: dict[str, Any]) -> None:
    """Apply a line's event, if it has one, to a snapshot."""
    snapshot.advance(line["at"])
    if "job" in line:
        request: dict[str, Any] = {
            key: math.inf if value == "inf" else value
            for key, value in line["job"].items()
            if value is not None  # older logs have null for what was not requested
        }
        snapshot.submit([Job(**request)], [line.get("known_s", math.nan)])
        history.submitted(Job(**request))
    elif "end" in line:
        row = snapshot.jobs.rows[line["end"]]
        if snapshot.jobs.running[row]:
            history.ended(line["end"], line["at"], float(snapshot.worked_s(np.array([row]), line["at"])[0]))
        else:
            history.departed(line["end"])
        snapshot.end(row)
    elif "fail" in line:
        snapshot.fail(snapshot.nodes.rows[line["fail"]])
    elif "mend" in line:
        snapshot.repair(snapshot.nodes.rows[line["mend"]], line["state"])
