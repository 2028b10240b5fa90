"""What is sent to Slurm, how its output is parsed, and what happens when its commands misbehave."""

import math
import os
import re
import stat
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cluster.engines import LaunchRequest
from headway.cluster.engines.slurm.batch_script import batch_script, slurm_task
from headway.cluster.engines.slurm.engine import SlurmEngine
from headway.cluster.engines.slurm.parse import (
    HOLD_S,
    CommentState,
    Partition,
    ScriptState,
    SlurmJobRow,
    check_room,
    job_status,
    parse_accounts,
    parse_comments,
    parse_nodes,
    parse_partitions,
    parse_queue,
    release_in,
    select_partitions,
)
from headway.errors import EngineError, UsageError

HERE = Path(__file__).parent
JOB = Path("/home/me/runs/it's/jobs/slurm-1")
REQUEST = LaunchRequest(
    "demo-1",
    ("python", "-c", "print('it is')", "$HOME", "two words"),
    Path("/home/me/runs/it's"),
    machines=2,
    gpus=8,
    cpus=32,
    memory_bytes=2**36,
    grace_s=120,
    environment={"NCCL_DEBUG": "a b", "A": "'"},
    setup=("module load cuda",),
    avoid=("n3", "n7"),
    array=4,
    site={
        "partition": "gpu",
        "account": "ml",
        "qos": "high",
        "constraint": "h100&nvme",
        "switches": "1@10:00",
        "gres": "gpu:h100",
    },
)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("slurm_job.golden", batch_script(REQUEST, JOB, 1440)),
        ("slurm_task.golden", slurm_task(REQUEST)),
        ("slurm_job_no_shared_folder.golden", batch_script(replace(REQUEST, shared=False), JOB, 1440)),
    ],
)
def test_scripts_match_the_golden_files(file: str, text: str) -> None:
    """To change them: review the difference, then write what is printed into the file."""
    assert text == (HERE / file).read_text(), text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_script_without_its_folder_does_nothing(tmp_path: Path) -> None:
    """As after a submission that was given up but that Slurm has accepted all the same."""
    script = batch_script(
        LaunchRequest("x", ("touch", str(tmp_path / "ran")), tmp_path), tmp_path / "jobs" / "slurm-1", None
    )
    done = subprocess.run(["bash", "-c", script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("site", "word"),
    [
        ({"partitions": "gpu"}, "partition"),
        ({"account": "a b"}, "account"),
        ({"account": "$(id)"}, "account"),
        ({"qos": "a\n#SBATCH --exclusive"}, "qos"),
        ({"restart": "never"}, "restart"),
        ({"exclusive": "1"}, "exclusive"),
    ],
)
def test_invalid_settings_are_refused(site: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError) as refused:
        batch_script(LaunchRequest("x", ("true",), Path("/x"), site=site), Path("/x/jobs/1"), None)
    assert word in f"{refused.value.message} {refused.value.hint}"


NODES = """\
n0|idle|64|515000|gpu:h100:8(S:0-1)|gpu:h100:0(IDX:N/A)|gpu*|none|
n0|idle|64|515000|gpu:h100:8(S:0-1)|gpu:h100:0(IDX:N/A)|long|none|
n1|mixed-|64|515000|gpu:h100:8|gpu:h100:3(IDX:0-2)|gpu*|none|
n2|down*|64|515000|gpu:(null):8|gpu:(null):0(IDX:N/A)|gpu*|Not responding|
n3|drained|64|515000|gpu:4,gpu:a100:4|gpu:0|gpu*|ECC errors|
c0|allocated|128|257000|(null)|(null)|cpu|none|
"""


def test_sinfo_nodes_are_parsed() -> None:
    machines = {machine.name: machine for machine in parse_nodes(NODES)}
    fields = {name: (node.state, node.gpus, node.gpus_free, node.groups) for name, node in machines.items()}
    assert fields == {
        "n0": ("free", 8, 8, ("gpu", "long")),
        "n1": ("busy", 8, 5, ("gpu",)),
        "n2": ("away", 8, 0, ("gpu",)),
        "n3": ("away", 8, 0, ("gpu",)),
        "c0": ("busy", 0, 0, ("cpu",)),
    }
    assert machines["n2"].reason == "down*: Not responding"
    assert machines["n0"].memory_bytes == 515000 * 2**20


def test_partition_limits_are_parsed() -> None:
    partitions = parse_partitions("gpu*|1-00:00:00\nlong|infinite\nshort|30:00\nodd|2:30:00\n")
    assert {name: partition.minutes for name, partition in partitions.items()} == {
        "gpu": 1440,
        "long": None,
        "short": 30,
        "odd": 150,
    }
    assert [partition.name for partition in select_partitions(partitions, None)] == ["gpu"]
    assert [partition.name for partition in select_partitions(partitions, "short,long,none")] == ["short", "long"]


@pytest.mark.parametrize(
    ("asks", "fits"),
    [
        ({"machines": 4, "gpus": 8}, True),  # nodes that are down may return
        ({"machines": 5}, False),
        ({"gpus": 9}, False),
        ({"cpus": 65}, False),
        ({"memory_bytes": 2**40}, False),
    ],
)
def test_requests_larger_than_a_partition_are_refused(asks: dict[str, int], fits: bool) -> None:
    request = LaunchRequest("x", ("true",), Path("/x"), **asks)
    machines, partition = parse_nodes(NODES), Partition("gpu", None, default=True)
    if fits:
        check_room(request, machines, [partition])
        return
    with pytest.raises(UsageError, match="partition gpu has 4, of which"):
        check_room(request, machines, [partition])


def test_refused_request_is_told_in_units_that_people_use() -> None:
    request = LaunchRequest("x", ("true",), Path("/x"), machines=5, cpus=1, memory_bytes=600 * 2**30)
    with pytest.raises(UsageError, match=r"5 machines with 1 CPU, 600 GiB each; .* \(the most: 64 CPUs, 503 GiB\)"):
        check_room(request, parse_nodes(NODES), [Partition("gpu", None, default=True)])


RAN = ScriptState(1, ("n0",))
DONE, FAILED, SAVED = ScriptState(1, ("n0",), 0), ScriptState(1, ("n0",), 3), ScriptState(1, ("n0",), 75)
CANCELLED = ScriptState(1, ("n0",), 75, cancelled=True)


@pytest.mark.parametrize(
    ("row", "script", "state"),
    [
        (SlurmJobRow("PENDING", "Resources"), ScriptState(), "waiting"),
        (SlurmJobRow("PENDING", "BadConstraints"), ScriptState(), "impossible"),
        (SlurmJobRow("PENDING", "QOSMaxWallDurationPerJobLimit"), ScriptState(), "impossible"),
        (SlurmJobRow("PENDING", "AssocMaxGRESPerJob"), ScriptState(), "impossible"),
        (SlurmJobRow("PENDING", "QOSMaxJobsPerUserLimit"), ScriptState(), "waiting"),
        (SlurmJobRow("PENDING", "Resources"), ScriptState(cancelled=True), "ending"),
        (SlurmJobRow("PENDING", "BeginTime"), CANCELLED, "ending"),
        (SlurmJobRow("CONFIGURING"), ScriptState(), "waiting"),
        (SlurmJobRow("RUNNING"), RAN, "running"),
        (SlurmJobRow("RUNNING"), SAVED, "waiting"),
        (SlurmJobRow("RUNNING"), ScriptState(1, ("n0",), cancelled=True), "ending"),
        (SlurmJobRow("COMPLETING"), SAVED, "waiting"),
        (SlurmJobRow("PENDING", "BeginTime"), SAVED, "waiting"),
        (SlurmJobRow("COMPLETED"), DONE, "finished"),
        (SlurmJobRow("FAILED"), FAILED, "failed"),
        (SlurmJobRow("FAILED"), SAVED, "failed"),
        (SlurmJobRow("FAILED"), CANCELLED, "cancelled"),
        (SlurmJobRow("CANCELLED"), DONE, "cancelled"),
        (SlurmJobRow("CANCELLED"), ScriptState(), "cancelled"),
        (SlurmJobRow("TIMEOUT"), RAN, "failed"),
        (SlurmJobRow("NODE_FAIL"), RAN, "failed"),
        (SlurmJobRow("OUT_OF_MEMORY"), RAN, "failed"),
        (SlurmJobRow("BETTER_THAN_EVER"), RAN, "unknown"),
        (None, DONE, "finished"),
        (None, FAILED, "failed"),
        (None, RAN, "failed"),
        (None, CANCELLED, "cancelled"),
        (None, ScriptState(), "unknown"),
    ],
)
def test_slurm_states_map_to_job_states(row: SlurmJobRow | None, script: ScriptState, state: str) -> None:
    status = job_status(row, script)
    assert status.state == state
    assert status.starts == script.starts or state == "impossible"


def test_squeue_and_sacct_are_parsed() -> None:
    rows = parse_queue("12|RUNNING|None|2026-01-02T03:04:05\n13_4|PENDING|Resources|N/A\n")
    assert (rows["12"].state, rows["13_4"].reason, rows["13_4"].begin) == ("RUNNING", "Resources", None)
    accounts = parse_accounts("12|CANCELLED by 1000|0:15|n0\n13_4|FAILED|3:0|n1\n14|COMPLETED|0:0|n[0-1]\n")
    assert [(row.state, row.exit_status) for row in accounts.values()] == [
        ("CANCELLED", 143),
        ("FAILED", 3),
        ("COMPLETED", 0),
    ]
    for parse, name in ((parse_queue, "squeue"), (parse_accounts, "sacct"), (parse_nodes, "sinfo")):
        with pytest.raises(EngineError, match=f'{name} printed "12 RUNNING"'):
            parse("12 RUNNING")


# -- commands that misbehave


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of fake Slurm commands, first in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    command(
        folder,
        "sinfo",
        'case "$*" in *Format=*) echo "n0|idle|8|1000|gpu:8|gpu:0|gpu*|none|";; *) echo "gpu*|infinite";; esac',
    )
    return folder


def command(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def refused(tmp_path: Path, kind: type[Exception] = EngineError) -> str:
    """The error for a job that cannot be submitted; nothing is left of it."""
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    with pytest.raises(kind) as raised:
        SlurmEngine(tmp_path / "records", patience_s=1).launch(LaunchRequest("x", ("true",), folder))
    assert not [path for path in folder.rglob("*") if path.is_file()]
    assert not (tmp_path / "records").exists() or not list((tmp_path / "records").iterdir())
    return f"{raised.value.message}; {raised.value.hint}"  # type: ignore[attr-defined]


def test_missing_slurm_commands_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "command sinfo not found" in refused(tmp_path)


def test_hanging_sbatch_times_out(tmp_path: Path, path: Path) -> None:
    command(path, "sbatch", "sleep 100")
    assert "sbatch did not answer within 1 s" in refused(tmp_path)


def test_unexpected_sbatch_output_is_reported(tmp_path: Path, path: Path) -> None:
    command(path, "sbatch", "echo Submitted: a job")
    assert 'sbatch printed "Submitted: a job", expected a job id' in refused(tmp_path)


@pytest.mark.parametrize(
    ("output", "kind", "hint"),
    [
        ("Unable to contact slurm controller (connect failure)", EngineError, "scontrol ping"),
        ("Invalid account or account/partition combination specified", EngineError, "sinfo"),
        ("Invalid qos specification", EngineError, "sacctmgr"),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            EngineError,
            "account",
        ),
        ("Requested node configuration is not available", UsageError, "headway nodes"),
    ],
)
def test_sbatch_refusal_is_quoted_with_a_hint(
    tmp_path: Path, path: Path, output: str, kind: type[Exception], hint: str
) -> None:
    command(path, "sbatch", f'echo "sbatch: error: Batch job submission failed: {output}" >&2; exit 1')
    message = refused(tmp_path, kind)
    assert f'"sbatch: error: Batch job submission failed: {output}"' in message
    assert hint in message


def test_job_is_cancelled_if_its_record_cannot_be_written(tmp_path: Path, path: Path) -> None:
    command(path, "sbatch", "echo 12")
    command(path, "scancel", f'echo "$@" >>{tmp_path}/cancelled')
    (tmp_path / "records").write_text("")
    folder = tmp_path / "run"
    with pytest.raises(EngineError, match="cannot write"):
        SlurmEngine(tmp_path / "records").launch(LaunchRequest("x", ("true",), folder))
    assert (tmp_path / "cancelled").read_text() == "--quiet 12\n"
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_callers_sbatch_variables_are_ignored(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")
    command(path, "sbatch", f"env >{tmp_path}/env; echo 12")
    SlurmEngine(tmp_path / "records").launch(LaunchRequest("x", ("true",), tmp_path))
    assert not [line for line in (tmp_path / "env").read_text().splitlines() if line.startswith(("SBATCH_", "SLURM_M"))]


def test_job_that_slurm_has_forgotten_is_known_by_its_files(tmp_path: Path, path: Path) -> None:
    """Without accounting, the files of its script are all there is."""
    command(path, "sbatch", "echo 12")
    engine = SlurmEngine(tmp_path / "records")
    job = engine.launch(LaunchRequest("x", ("true",), tmp_path))
    command(path, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    command(path, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert engine.status([job])[job].state == "unknown"
    folder = next((tmp_path / "jobs").iterdir())
    (folder / "starts").write_text("1 n0,n1\n2 n2,n3\n")
    (folder / "ended").write_text("1 75\n2 3\n")
    status = engine.status([job])[job]
    assert (status.state, status.exit_status, status.starts, status.machines) == ("failed", 3, 2, ("n2", "n3"))
    command(path, "sacct", "echo '12|COMPLETED|0:0|n0'")
    (folder / "ended").write_text("1 75\n2 0\n")
    assert engine.status([job])[job].state == "finished"
    command(path, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(EngineError, match="Unable to contact slurm controller"):
        engine.status([job])


NOON = 1_800_000_000.0
HELD = SlurmJobRow("PENDING", "BeginTime", begin=NOON)
ORPHAN, ORPHAN_DONE = ScriptState(1, ("n0",), 75, orphaned=True), ScriptState(1, ("n0",), 0, orphaned=True)


@pytest.mark.parametrize(
    ("row", "script", "state", "remedy"),
    [
        (HELD, SAVED, "waiting", "requeue"),
        (HELD, ScriptState(), "waiting", "requeue"),
        (SlurmJobRow("PENDING", "Resources"), SAVED, "waiting", ""),
        (SlurmJobRow("PENDING", "BeginTime"), SAVED, "waiting", ""),  # until nobody knows when
        (HELD, CANCELLED, "ending", ""),  # its script ends when it is started
        (SlurmJobRow("RUNNING"), RAN, "running", ""),
        (SlurmJobRow("RUNNING"), ORPHAN, "waiting", "requeue"),
        (SlurmJobRow("RUNNING"), ORPHAN_DONE, "running", "cancel"),
        (SlurmJobRow("RUNNING"), replace(ORPHAN, cancelled=True), "ending", "cancel"),
        (SlurmJobRow("RUNNING"), ScriptState(1, ("n0",), cancelled=True), "ending", ""),
        (SlurmJobRow("RUNNING"), ScriptState(1, ("n0",), cancelled=True, overdue=True), "ending", "cancel"),
        (SlurmJobRow("CANCELLED"), ORPHAN_DONE, "finished", ""),
        (None, ORPHAN_DONE, "finished", ""),
    ],
)
def test_stuck_jobs_name_the_command_that_helps(
    row: SlurmJobRow | None, script: ScriptState, state: str, remedy: str
) -> None:
    status = job_status(row, script)
    assert (status.state, status.remedy) == (state, remedy)


@given(
    requeued=st.floats(0, 1),
    first=st.floats(0, 119),
    second=st.floats(0, 119),
    late=st.floats(0, 3),
    cleared_s=st.sampled_from([0, 3, 10]),
)
def test_releasing_twice_never_starts_a_job_too_early(
    requeued: float, first: float, second: float, late: float, cleared_s: float
) -> None:
    """Slurm keeps whole seconds, and holds for 120 to 121. A start within the same second as the last end fails."""
    requeued, begin = NOON + requeued, NOON + HOLD_S + 1
    for now in (requeued + first, requeued + first + late + second):
        if now >= begin:
            break
        wait_s = release_in(begin, now, cleared_s)
        if wait_s is not None:
            begin = math.floor(now + late) + wait_s  # scontrol takes its time
    assert begin >= math.floor(requeued + cleared_s)


def test_only_release_and_cancel_act_on_stuck_jobs(tmp_path: Path, path: Path) -> None:
    acts = tmp_path / "acts"
    command(path, "sbatch", "echo 12")
    for name in ("scontrol", "scancel"):
        command(path, name, f'echo "{name} $*" >>{acts}')
    engine = SlurmEngine(tmp_path / "records", cleared_s=10)
    job = engine.launch(LaunchRequest("x", ("true",), tmp_path))
    folder = next((tmp_path / "jobs").iterdir())
    (folder / "starts").write_text("1 n0\n")
    (folder / "ended").write_text("1 75\n")

    def held(seconds: float) -> None:
        begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
        command(path, "squeue", f"echo '12|PENDING|BeginTime|{begin}'")

    held(60)  # requeued a minute ago
    begin = time.time() + 60
    minutes = {time.strftime("%H:%M", time.localtime(begin + late)) for late in (-60, 0, 60)}
    status = engine.status([job])[job]
    assert (status.state, status.remedy) == ("waiting", "requeue")
    assert status.reason.removeprefix("held by Slurm until ") in minutes
    assert not acts.exists()
    assert engine.release(job)
    assert acts.read_text() == "scontrol update JobId=12 StartTime=now+0seconds\n"
    held(119)  # requeued just now: Slurm mixes up starts that follow each other at once
    assert SlurmEngine(tmp_path / "records", cleared_s=60).release(job)
    wait_s = int(acts.read_text().splitlines()[1].rpartition("now+")[2].removesuffix("seconds"))
    assert 0 < wait_s <= 60
    held(9)  # released before: nothing helps it along
    status = engine.status([job])[job]
    assert (status.state, status.remedy) == ("waiting", "")
    assert re.fullmatch(r"starts at \d\d:\d\d:\d\d or later", status.reason)
    assert engine.release(job)
    assert len(acts.read_text().splitlines()) == 2

    (folder / "ended").unlink()
    for ended, remedy, act in (("75", "requeue", "scontrol requeue 12"), ("0", "cancel", "scancel --quiet 12")):
        acts.write_text("")
        command(path, "squeue", "echo '12|RUNNING|None|N/A'")
        (folder / "0001-1.end").write_text(f"{ended}\n")
        os.utime(folder / "0001-1.end", (NOON - 1e9, NOON - 1e9))  # long ago: its script must be dead
        assert engine.status([job])[job].remedy == remedy
        assert acts.read_text() == ""
        assert engine.release(job) == (remedy == "requeue")
        engine.cancel(job) if remedy == "cancel" else None
        assert act in acts.read_text().splitlines()


# -- the batch script, with fake Slurm commands


class Batch:
    """A job's folder, whose script can be run as job 12 on n0 and n1."""

    def __init__(self, tmp_path: Path, path: Path) -> None:
        self.bin, self.folder = path, tmp_path / "jobs" / "slurm-1"
        self.folder.mkdir(parents=True)
        self.submitted = tmp_path / "submitted"
        command(path, "sbatch", f'echo "$@" >>{self.submitted}; echo 13')
        self.scontrol("true")
        (self.folder / "job.sh").write_text(
            batch_script(LaunchRequest("x", ("true",), tmp_path, machines=2), self.folder, 1)
        )

    def scontrol(self, requeue: str) -> None:
        command(self.bin, "scontrol", f'[ "$1" != show ] || {{ echo n0; echo n1; exit; }}; {requeue}')

    def run(self, srun: str, job: int = 12) -> int:
        """The script's exit status. It has its own process group, as Slurm signals everything that it started."""
        command(self.bin, "srun", srun)
        environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "n[0-1]"}
        command_line = ["bash", self.folder / "job.sh"]
        return subprocess.run(command_line, env=environment, start_new_session=True, timeout=300).returncode

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def batch(tmp_path: Path, path: Path) -> Batch:
    return Batch(tmp_path, path)


def test_requeued_job_is_not_submitted_again(batch: Batch) -> None:
    """Slurm kills the script and its scontrol while scontrol still waits for the answer to the requeue."""
    batch.scontrol("kill -TERM 0")
    assert batch.run("exit 75") == 75
    assert batch.lines("ended") == ["1 75"]
    assert not batch.submitted.exists()


def test_job_resubmits_itself_if_requeue_is_disabled(batch: Batch) -> None:
    batch.scontrol("echo Requested operation is presently disabled >&2; exit 1")
    assert batch.run("exit 75") == 75
    assert batch.submitted.read_text() == f"--parsable --dependency=afterany:12 {batch.folder}/job.sh\n"
    assert batch.lines("ids") == ["13"]


@pytest.mark.parametrize(
    "message",
    [
        "Task launch for StepId=1.0 failed on node n1: Communication connection failure",
        "Task launch for StepId=1.0 failed on node n1: Socket timed out on send/recv operation",
        "step_launch_notify_io_failure: aborting, io error with slurmstepd on node 1",
    ],
)
def test_machine_that_srun_cannot_reach_is_excluded(batch: Batch, message: str) -> None:
    """Slurm itself may take minutes to notice, and would give it to the next start."""
    batch.scontrol("touch requeued")
    assert batch.run(f'echo "srun: error: {message}" >&2; exit 137') == 75
    assert (batch.lines("ended"), batch.lines("lost")) == (["1 75"], ["1 n1"])
    assert "--exclude=n1 " in batch.submitted.read_text()
    assert batch.lines("ids") == ["13"]


def test_node_failure_is_left_to_slurms_own_requeue(batch: Batch) -> None:
    batch.scontrol("echo Job is pending execution >&2; kill -TERM 0; exit 1")
    assert batch.run('echo "srun: error: Node failure on n1" >&2; echo 75 >"$HEADWAY_LOG-0.end"; exit 143') == 75
    assert batch.lines("lost") == ["1 n1"]
    assert not batch.submitted.exists()


@pytest.mark.parametrize(
    "message", ["n0: task 0: Exited with exit code 3", "Task launch failed on node n1: Bad prolog"]
)
def test_failing_command_is_not_restarted(batch: Batch, message: str) -> None:
    batch.scontrol(f"touch {batch.submitted}")
    assert batch.run(f'echo "srun: error: {message}" >&2; exit 3') == 3
    assert (batch.lines("ended"), batch.lines("lost")) == (["1 3"], [])
    assert not batch.submitted.exists()


def test_superfluous_start_does_nothing(batch: Batch) -> None:
    (batch.folder / "starts").write_text("1 n0,n1\n")
    (batch.folder / "ended").write_text("1 75\n")
    (batch.folder / "ids").write_text("13\n")
    assert batch.run("exit 3", job=12) == 0  # a newer job has replaced this one
    assert len(batch.lines("starts")) == 1
    assert batch.run("exit 0", job=13) == 0
    assert (len(batch.lines("starts")), batch.lines("ended")[-1]) == (2, "2 0")
    assert batch.run("exit 3", job=13) == 0  # its work is done
    assert (len(batch.lines("starts")), batch.lines("ended")[-1]) == (2, "2 0")


def test_lost_machine_is_named_in_the_reason() -> None:
    held = SlurmJobRow("PENDING", "BeginTime")
    assert job_status(held, ScriptState(1, ("n0", "n1"), 75, lost="n1")).reason.startswith("n1 was lost; held by Slurm")
    assert job_status(held, ScriptState(1, ("n0", "n1"))).reason.startswith(
        "its last start was cut off, as when a machine is lost; "
    )
    assert job_status(held, ScriptState(1, ("n0",), 75)).reason.startswith("held by Slurm")
    assert (
        job_status(SlurmJobRow("COMPLETED"), ScriptState(1, ("n0", "n1", "n2"), 0, lost="n1")).reason == "n1 was lost"
    )
    orphaned = job_status(SlurmJobRow("CANCELLED"), ScriptState(1, ("n0", "n1", "n2"), 0, orphaned=True))
    assert (orphaned.state, orphaned.reason) == ("finished", "n0 was lost")


def test_job_with_spares_survives_a_node_failure() -> None:
    plain, spare = (batch_script(replace(REQUEST, spares=number), Path("/jobs"), 60) for number in (0, 1))
    assert "no-kill" not in plain
    assert "#SBATCH --no-kill\n" in spare
    assert "--kill-on-bad-exit=0 --wait=0 --no-kill " in spare


def test_script_without_shared_folder_names_no_folder() -> None:
    text = batch_script(replace(REQUEST, shared=False), JOB, 1440)
    assert str(REQUEST.folder) not in text.replace("'\"'\"'", "'")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


def test_comments_are_parsed() -> None:
    lines = [
        "12|slurm-a starts=1 on=n0,n1 ended=75|",
        "15|slurm-a starts=2 on=n2,n1 ended=0 lost=n1|",
        "9|slurm-a starts=0|",
        "16_1|slurm-b|",
        "17_[2-5%2]|(null)|",
        "18|a comment | of somebody's own|",
        "19||",
    ]
    states = parse_comments("\n".join(lines))
    assert states["slurm-a", ""] == CommentState("15", 2, "n2,n1", 0, "n1")
    assert states["slurm-b", "1"] == CommentState("16_1")
    assert ("slurm-b", "") not in states
