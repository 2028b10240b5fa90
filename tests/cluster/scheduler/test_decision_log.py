"""Every decision can be made again from its record, and asked about."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decision_log import policies_in, record_of, replay, state_at
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.wait_reasons import explain_wait
from headway.cluster.simulate import JobTrace, SimulationSetup, simulate
from headway.errors import UsageError

SETUP = SimulationSetup("a100", 4, 4, node_days=0.5, repair_s=3600.0, spares=1, restart_s=60.0)


def log(seed: int, jobs: int = 120) -> JobTrace:
    chance = np.random.default_rng(seed)
    return JobTrace(
        tuple(f"job-{number}" for number in range(jobs)),
        np.sort(chance.uniform(0, 40_000, jobs)),
        chance.lognormal(6.5, 1.5, jobs),
        chance.choice([1, 1, 2, 4, 6, 8], jobs),
        chance.integers(0, 2, jobs),
        ("blue", "red"),
        np.full(jobs, np.nan),
        np.full(jobs, np.nan),
    )


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    for name, policy in POLICIES.items():
        simulate(log(1), SETUP, policy, record=record_of(folder, name))
    return folder


@pytest.mark.parametrize("name", POLICIES)
def test_what_was_decided_is_decided_again(records: Path, name: str) -> None:
    told = list(replay(record_of(records, name)))
    assert len(told) > 50
    assert told == [None] * len(told)


def test_a_record_of_all_policies_is_found(records: Path, tmp_path: Path) -> None:
    assert policies_in(records) == sorted(POLICIES)
    with pytest.raises(UsageError, match="has no records"):
        policies_in(tmp_path)


def lines_of(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def changed(source: Path, out: Path, change) -> Path:
    """A copy of a record with another first line that has starts in it."""
    lines = lines_of(source)
    for number, text in enumerate(lines):
        line = json.loads(text)
        if any(one[0] == "start" for one in line.get("decided", ())):
            change(line)
            lines[number] = json.dumps(line)
            break
    with gzip.open(out, "wt") as file:
        file.write("\n".join(lines) + "\n")
    return out


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("another node", lambda line: line["decided"][0][2][1].__setitem__(0, 2)),
        ("nothing", lambda line: line.update(decided=[])),
        ("another reason", lambda line: line["decided"][0].__setitem__(4, "backfill")),
        ("one more", lambda line: line["decided"].append(line["decided"][0])),
    ],
)
def test_what_is_decided_otherwise_is_found_and_named(records: Path, tmp_path: Path, what: str, change) -> None:
    path = changed(record_of(records, "headway"), tmp_path / "x.jsonl.gz", change)
    *equal, last = replay(path)
    assert equal == [None] * len(equal)
    assert last is not None
    assert last.recorded != last.today
    assert last.cycle == len(equal)


@pytest.mark.parametrize(
    "content",
    [b"", b"not gzip", gzip.compress(b"{}"), gzip.compress(b"[1]\n"), gzip.compress(b'{"format": 1}\n{"at"')],
    ids=["empty", "not gzip", "no format", "a list", "cut short"],  # gzip writes the time of day
)
def test_what_is_no_record_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        list(replay(path))
    assert "\n" not in error.value.message


def test_a_record_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no record"):
        list(replay(tmp_path / "none.jsonl.gz"))


# -- why


def waiting(records: Path, name: str) -> tuple[float, str]:
    """A time, and a job that waits then."""
    for line in map(json.loads, lines_of(record_of(records, name))):
        if "decided" not in line or line["at"] < 10_000:
            continue
        snapshot, policy, *_ = state_at(record_of(records, name), line["at"])
        # a cycle may leave room that the next one fills: who waits then does so for something else
        if len(snapshot.queue) and all(one.kind == "reserve" for one in decide(snapshot, line["at"], policy)):
            return line["at"], snapshot.jobs.names[int(policy.order(snapshot, line["at"])[-1])]
    raise AssertionError("somebody waits in every log")


@pytest.mark.parametrize("name", POLICIES)
def test_a_job_that_waits_is_told_why(records: Path, name: str) -> None:
    at, job = waiting(records, name)
    snapshot, policy, *_ = state_at(record_of(records, name), at)
    before = snapshot.to_json()
    told = explain_wait(snapshot, at, policy, job)
    assert told.state == "waits"
    assert told.reason.sentence
    assert sum(holder.gpus for holder in told.holders) == snapshot.jobs.gpus[snapshot.active].sum()
    assert snapshot.to_json() == before, "a question changes nothing"


def test_a_job_that_runs_and_one_that_nobody_knows(records: Path) -> None:
    at, _ = waiting(records, "headway")
    snapshot, policy, *_ = state_at(record_of(records, "headway"), at)
    told = explain_wait(snapshot, at, policy, snapshot.jobs.names[int(snapshot.active[0])])
    assert told.state == "runs"
    assert "GPUs since" in told.reason.sentence
    with pytest.raises(UsageError, match="there is no job nobody"):
        explain_wait(snapshot, at, policy, "nobody")


def test_before_anything_has_happened(records: Path) -> None:
    with pytest.raises(UsageError, match="nothing had happened"):
        state_at(record_of(records, "headway"), -1.0)


@pytest.mark.parametrize(
    ("what", "cut", "said"),
    [
        ("the end", lambda lines: lines[:-1], "is cut off"),
        ("half", lambda lines: lines[: len(lines) // 2], "is cut off"),
        ("the last cycles", lambda lines: [*lines[:-4], lines[-1]], "was changed"),
        ("every decision", lambda lines: [line for line in lines if "decided" not in line], "was changed"),
    ],
)
def test_a_record_that_lacks_something_proves_nothing(records: Path, tmp_path: Path, what: str, cut, said: str) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(("\n".join(cut(lines_of(record_of(records, "fifo")))) + "\n").encode()))
    with pytest.raises(UsageError, match=said):
        list(replay(path))


def test_a_gang_that_the_band_holds_back_is_told_so(tmp_path: Path) -> None:
    """Twelve GPUs of jobs that cannot be stopped, and four more would leave nothing of sixteen."""
    trace = JobTrace(
        tuple(f"j{number}" for number in range(13)),
        np.array([0.0] * 12 + [10.0]),
        np.full(13, 5000.0),
        np.array([1] * 12 + [4]),
        np.zeros(13, np.int64),
        ("all",),
        np.full(13, np.nan),
        np.full(13, np.nan),
    )
    path = tmp_path / "headway.jsonl.gz"
    simulate(trace, SimulationSetup("a100", 8, 2, preemptible=0.0), POLICIES["headway"], record=path)
    snapshot, policy, *_ = state_at(path, 100.0)
    told = explain_wait(snapshot, 100.0, policy, "j12")
    assert told.reason.code == "band"
    assert told.reason.sentence.endswith("such jobs may hold 14 at most")


def test_a_record_of_before_there_were_deadlines_is_read(records: Path, tmp_path: Path) -> None:
    """It had no word for what nobody asked for, and null for no limit."""
    path, lines = tmp_path / "x.jsonl.gz", [json.loads(line) for line in lines_of(record_of(records, "fifo"))[:-1]]
    new = {"deadline_s", "sizes", "kind", "min_run_s"}
    for line in lines:
        if "job" in line:
            line["job"] = {key: value for key, value in line["job"].items() if key not in new} | {"limit_s": None}
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    last = json.dumps({"lines": len(lines), "sum": xxhash.xxh3_64(text.encode()).hexdigest()})
    path.write_bytes(gzip.compress((text + last + "\n").encode()))
    assert set(replay(path)) == {None}
