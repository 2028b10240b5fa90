"""What a scheduler saw and decided, line by line, so that every decision can be made again.

A record is a gzipped file of JSON lines: the cluster and its policy first, then each thing that happened (jobs that
came or ended) and each cycle with what was decided. Nothing else moves a Snapshot, so that whoever reads the lines has
it as it was at any time. What was decided is compared with what the same function decides of it today. The last line
counts the others and has a checksum of them: a record that was cut off or changed is known for one.
"""

import gzip
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
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

__all__ = [
    "DecisionMismatch",
    "DecisionRecorder",
    "PastState",
    "apply_decisions",
    "job_times",
    "policies_in",
    "record_of",
    "replay",
    "replay_until",
    "state_at",
]

FORMAT = 1


def record_of(folder: Path, policy: str) -> Path:
    """Where a policy's record is."""
    return folder / f"{policy}.jsonl.gz"


def policies_in(folder: Path) -> list[str]:
    """Policies that a folder has records of; UsageError where there are none."""
    found = sorted(path.name.removesuffix(".jsonl.gz") for path in folder.glob("*.jsonl.gz"))
    if not found:
        raise UsageError(f"{folder} has no records", hint="headway simulate --record DIR writes some")
    return found


class DecisionRecorder:
    """Writes a record."""

    def __init__(self, path: Path, snapshot: ClusterSnapshot, policy: Policy) -> None:
        self._file: TextIO = gzip.open(path, "wt", encoding="utf-8", compresslevel=3)  # noqa: SIM115 (until `close`)
        self._sum, self._count = xxhash.xxh3_64(), 0
        head = {"format": FORMAT, "policy": policy.name, "cluster": json.loads(snapshot.to_json())}
        self._write(head)

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._file.write(text)
        self._sum.update(text.encode())
        self._count += 1

    def came(self, now: float, job: Job, known_s: float = math.nan) -> None:
        """A job was submitted."""
        told = {} if math.isnan(known_s) else {"known_s": known_s}
        asked = {key: "inf" if value == math.inf else value for key, value in asdict(job).items()}
        self._write({"at": now, "job": asked} | told)

    def ended(self, now: float, name: str) -> None:
        """A job is done."""
        self._write({"at": now, "end": name})

    def failed(self, now: float, node: str) -> None:
        """A node is lost."""
        self._write({"at": now, "fail": node})

    def mended(self, now: float, node: str, state: int) -> None:
        """A node is well again."""
        self._write({"at": now, "mend": node, "state": state})

    def decided(self, now: float, snapshot: ClusterSnapshot, decisions: Sequence[Decision]) -> None:
        """A cycle is over; `snapshot` is as it was before."""
        self._write({"at": now, "decided": [_said(snapshot, decision) for decision in decisions]})

    def close(self) -> None:
        """Nothing more will happen."""
        self._file.write(json.dumps({"lines": self._count, "sum": self._sum.hexdigest()}) + "\n")
        self._file.close()


def _said(snapshot: ClusterSnapshot, decision: Decision) -> list[Any]:
    """A decision by names and numbers; what a file gives back compares equal."""
    place = [decision.pool, decision.place.nodes.tolist(), decision.place.gpus.tolist()]
    numbers = [list(pair) for pair in decision.reason.numbers]
    return [decision.kind, snapshot.jobs.names[decision.job], place, decision.at_s, decision.reason.code, numbers]


def _meant(snapshot: ClusterSnapshot, said: Sequence[Any]) -> Decision:
    """The decision that `_said` made words of."""
    kind, name, (pool, nodes, gpus), at_s, code, numbers = said
    place = Placement(np.array(nodes, np.int32), np.array(gpus, np.int32))
    reason = Reason(ReasonCode(code), tuple((key, value) for key, value in numbers))
    return Decision(kind, snapshot.jobs.rows[name], pool, place, reason, at_s)


def apply_decisions(snapshot: ClusterSnapshot, decisions: Iterable[Decision]) -> None:
    """Do to a snapshot what was decided, at its own time: stops first, which make room, then all else in its order."""
    decisions = list(decisions)
    stops = [decision.job for decision in decisions if decision.kind == "stop"]
    if stops:
        snapshot.stop_all(stops)
    for decision in decisions:
        if decision.kind == "move":
            snapshot.move(decision.job)
        elif decision.kind == "start":
            snapshot.start(decision.job, decision.pool, decision.place)
        elif decision.kind == "resize":
            snapshot.resize(decision.job, decision.pool, decision.place)


@dataclass(frozen=True)
class DecisionMismatch:
    """The first cycle that is decided otherwise today."""

    at_s: float
    cycle: int
    recorded: tuple[Any, ...]
    """What was decided first of all that differs; empty where nothing was."""
    today: tuple[Any, ...]


def replay(path: Path) -> Iterator[DecisionMismatch | None]:
    """Decide every recorded cycle again: None for each that is equal. The first that is not is the last."""
    number = 0
    for _, snapshot, policy, line in _lines(path):
        if "decided" not in line:
            continue
        today = decide(snapshot, line["at"], policy)
        mine = json.loads(json.dumps([_said(snapshot, decision) for decision in today]))
        if mine != line["decided"]:
            longest = max(len(mine), len(line["decided"]))
            pairs = [(_at(line["decided"], i), _at(mine, i)) for i in range(longest)]
            recorded, now = next(pair for pair in pairs if pair[0] != pair[1])
            yield DecisionMismatch(line["at"], number, tuple(recorded), tuple(now))
            return
        apply_decisions(snapshot, today)
        number += 1
        yield None


class PastState(NamedTuple):
    """What was known at a time."""

    snapshot: ClusterSnapshot
    policy: Policy
    history: JobHistory
    decided: bool
    """Whether the last thing that happened was a cycle."""


def replay_until(path: Path, until_s: float = math.inf) -> Iterator[PastState]:
    """Everything that happened until a time, one thing after another; it is the same snapshot that moves on."""
    for history, snapshot, policy, line in _lines(path, until_s):
        if "decided" in line:
            apply_decisions(snapshot, [_meant(snapshot, said) for said in line["decided"]])
        yield PastState(snapshot, policy, history, "decided" in line)


def state_at(path: Path, at_s: float) -> PastState:
    """The snapshot after everything that happened until a time, and the policy it was under."""
    found = next(iter(deque(replay_until(path, at_s), maxlen=1)), None)
    if found is None:
        raise UsageError(f"nothing had happened yet at {at_s:.0f} s", hint="--at names a later second of the record")
    return found


def job_times(path: Path, job: str) -> tuple[float | None, float | None]:
    """When a job came, and when it was done; None for what the record does not have."""
    came = ended = None
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in map(json.loads, file):
            came = line["at"] if line.get("job", {}).get("name") == job else came
            ended = line["at"] if line.get("end") == job else ended
    return came, ended


def _at(decisions: Sequence[Any], number: int) -> Any:
    return decisions[number] if number < len(decisions) else ()


def _lines(
    path: Path, until_s: float = math.inf
) -> Iterator[tuple[JobHistory, ClusterSnapshot, Policy, dict[str, Any]]]:
    """Each line until a time, with the snapshot as it is then: what happened is in it, a cycle's decisions are not."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            first = next(file, "{}")
            head, total, count = json.loads(first), xxhash.xxh3_64(first.encode()), 1
            if not isinstance(head, dict) or head.get("format") != FORMAT or head.get("policy") not in POLICIES:
                raise UsageError(f"{path} is no record of decisions that is known here")
            snapshot, policy = ClusterSnapshot.from_json(json.dumps(head["cluster"])), POLICIES[head["policy"]]
            history = JobHistory()
            for text in file:
                line = json.loads(text)
                if "sum" in line:
                    if (line["lines"], line["sum"]) != (count, total.hexdigest()):
                        raise UsageError(f"{path} was changed after it was written", hint="record it again")
                    return
                if line["at"] > until_s:
                    return
                total.update(text.encode())
                count += 1
                snapshot.advance(line["at"])
                if "job" in line:
                    asked: dict[str, Any] = {
                        key: math.inf if value == "inf" else value
                        for key, value in line["job"].items()
                        if value is not None  # what older records say where nothing was asked for
                    }
                    snapshot.submit([Job(**asked)], [line.get("known_s", math.nan)])
                    history.submitted(Job(**asked))
                elif "end" in line:
                    row = snapshot.jobs.rows[line["end"]]
                    if snapshot.jobs.running[row]:
                        worked = float(snapshot.worked_s(np.array([row]), line["at"])[0])
                        history.ended(line["end"], line["at"], worked)
                    else:
                        history.departed(line["end"])
                    snapshot.end(row)
                elif "fail" in line:
                    snapshot.fail(snapshot.nodes.rows[line["fail"]])
                elif "mend" in line:
                    snapshot.mend(snapshot.nodes.rows[line["mend"]], line["state"])
                yield history, snapshot, policy, line
        raise UsageError(f"{path} is cut off: what wrote it did not come to its end", hint="record it again")
    except (FileNotFoundError, IsADirectoryError):
        raise UsageError(f"there is no record {path}", hint="headway simulate --record DIR writes one") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no record of decisions, or damaged: {error}") from None
