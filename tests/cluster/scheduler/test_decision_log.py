"""Every decision can be replayed from its log, and explained."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decision_log import policies_in, record_of, replay, state_at
from headway.cluster.scheduler.decisions import Reason, ReasonCode
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.wait_reasons import explain_wait
from headway.cluster.simulate import JobTrace, SimulationSetup, simulate
from headway.errors import UsageError

SETUP = SimulationSetup("a100", 4, 4, node_days=0.5, repair_s=3600.0, spares=1, restart_s=60.0)


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (Reason(ReasonCode.FIRST, (("gpus", 1),)), "1 GPU is free, and no higher-ranked job waits for them"),
        (
            Reason(ReasonCode.FIRST, (("gpus", 0),)),
            "its CPUs and memory are free, and no higher-ranked job waits for them",
        ),
        (Reason(ReasonCode.FIRST, (("gpus", 11),)), "11 GPUs are free, and no higher-ranked job waits for them"),
        (
            Reason(ReasonCode.DISPLACES, (("count", 1), ("lost_gpu_s", 2.0))),
            "starts by preempting 1 job, which loses 2 GPU-seconds of work",
        ),
        (Reason(ReasonCode.COMPACTED, (("count", 1),)), "starts on nodes that 1 job leaves for other free GPUs"),
        (
            Reason(ReasonCode.GROWS, (("before", 1), ("gpus", 2), ("adds", 0.1))),
            "grows from 1 to 2 GPUs, which adds the work of 0.1 GPUs",
        ),
    ],
)
def test_reasons_count_in_the_singular_and_the_plural(reason: Reason, sentence: str) -> None:
    assert reason.sentence == sentence


def random_trace(seed: int, jobs: int = 120) -> JobTrace:
    rng = np.random.default_rng(seed)
    return JobTrace(
        tuple(f"job-{number}" for number in range(jobs)),
        np.sort(rng.uniform(0, 40_000, jobs)),
        rng.lognormal(6.5, 1.5, jobs),
        rng.choice([1, 1, 2, 4, 6, 8], jobs),
        rng.integers(0, 2, jobs),
        ("blue", "red"),
        np.full(jobs, np.nan),
        np.full(jobs, np.nan),
    )


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    for name, policy in POLICIES.items():
        simulate(random_trace(1), SETUP, policy, record=record_of(folder, name))
    return folder


@pytest.mark.parametrize("name", POLICIES)
def test_replay_repeats_every_decision(logs: Path, name: str) -> None:
    mismatches = list(replay(record_of(logs, name)))
    assert len(mismatches) > 50
    assert mismatches == [None] * len(mismatches)


def test_policies_of_a_folder_are_listed(logs: Path, tmp_path: Path) -> None:
    assert policies_in(logs) == sorted(POLICIES)
    with pytest.raises(UsageError, match="has no decision logs"):
        policies_in(tmp_path)


def lines_of(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def modified_log(source: Path, out: Path, change) -> Path:
    """Copy a log with the first line that has starts changed."""
    lines = lines_of(source)
    for number, text in enumerate(lines):
        line = json.loads(text)
        if any(decision[0] == "start" for decision in line.get("decided", ())):
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
def test_replay_reports_the_first_different_decision(logs: Path, tmp_path: Path, what: str, change) -> None:
    path = modified_log(record_of(logs, "headway"), tmp_path / "x.jsonl.gz", change)
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
def test_invalid_log_is_rejected_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        list(replay(path))
    assert "\n" not in error.value.message


def test_missing_log_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no decision log"):
        list(replay(tmp_path / "none.jsonl.gz"))


# -- why


def find_waiting_job(logs: Path, name: str) -> tuple[float, str]:
    """Return a time, and a job that waits then."""
    for line in map(json.loads, lines_of(record_of(logs, name))):
        if "decided" not in line or line["at"] < 10_000:
            continue
        snapshot, policy, *_ = state_at(record_of(logs, name), line["at"])
        # a cycle may leave GPUs free that the next one uses: take one that starts nothing
        if len(snapshot.queue) and all(decision.kind == "reserve" for decision in decide(snapshot, line["at"], policy)):
            return line["at"], snapshot.jobs.names[int(policy.order(snapshot, line["at"])[-1])]
    raise AssertionError("jobs wait in every trace")


@pytest.mark.parametrize("name", POLICIES)
def test_waiting_job_gets_an_explanation(logs: Path, name: str) -> None:
    at, job = find_waiting_job(logs, name)
    snapshot, policy, *_ = state_at(record_of(logs, name), at)
    before = snapshot.to_json()
    explanation = explain_wait(snapshot, at, policy, job)
    assert explanation.state == "waits"
    assert explanation.reason.sentence
    assert sum(holder.gpus for holder in explanation.holders) == snapshot.jobs.gpus[snapshot.active].sum()
    assert snapshot.to_json() == before, "a question changes nothing"


def test_running_job_is_explained_and_unknown_job_is_rejected(logs: Path) -> None:
    at, _ = find_waiting_job(logs, "headway")
    snapshot, policy, *_ = state_at(record_of(logs, "headway"), at)
    explanation = explain_wait(snapshot, at, policy, snapshot.jobs.names[int(snapshot.active[0])])
    assert explanation.state == "runs"
    assert "1 GPU since" in explanation.reason.sentence
    with pytest.raises(UsageError, match="no job 'nobody'"):
        explain_wait(snapshot, at, policy, "nobody")


def test_state_before_the_first_event_is_rejected(logs: Path) -> None:
    with pytest.raises(UsageError, match="nothing had happened"):
        state_at(record_of(logs, "headway"), -1.0)


@pytest.mark.parametrize(
    ("what", "cut", "message"),
    [
        ("the end", lambda lines: lines[:-1], "is truncated"),
        ("half", lambda lines: lines[: len(lines) // 2], "is truncated"),
        ("the last cycles", lambda lines: [*lines[:-4], lines[-1]], "was modified"),
        ("every decision", lambda lines: [line for line in lines if "decided" not in line], "was modified"),
    ],
)
def test_truncated_or_modified_log_is_rejected(logs: Path, tmp_path: Path, what: str, cut, message: str) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(("\n".join(cut(lines_of(record_of(logs, "fifo")))) + "\n").encode()))
    with pytest.raises(UsageError, match=message):
        list(replay(path))


def test_explanation_names_the_non_preemptible_limit(tmp_path: Path) -> None:
    """Non-preemptible jobs hold twelve of sixteen GPUs, and four more would fill the cluster."""
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
    explanation = explain_wait(snapshot, 100.0, policy, "j12")
    assert explanation.reason.code == "band"
    assert explanation.reason.sentence == "non-preemptible limit (12 in use + 4 requested > 14 allowed)"


def test_log_from_before_deadlines_is_read(logs: Path, tmp_path: Path) -> None:
    """It lacks later fields, and has null for no limit."""
    path, lines = tmp_path / "x.jsonl.gz", [json.loads(line) for line in lines_of(record_of(logs, "fifo"))[:-1]]
    new = {"deadline_s", "sizes", "kind", "min_run_s"}
    for line in lines:
        if "job" in line:
            line["job"] = {key: value for key, value in line["job"].items() if key not in new} | {"limit_s": None}
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    last = json.dumps({"lines": len(lines), "sum": xxhash.xxh3_64(text.encode()).hexdigest()})
    path.write_bytes(gzip.compress((text + last + "\n").encode()))
    assert set(replay(path)) == {None}
