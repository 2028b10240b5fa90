"""`headway submit` and its companions as a person types them, on this machine's own queue: real runs, real agents."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eventually import eventually
from headway.cli.main import main
from headway.cluster.engines.settings import engine_settings, open_engine
from headway.cluster.engines.submissions import last_submission, note_submission
from headway.errors import UsageError
from headway.recipe import to_toml
from headway.track import Recorder, RunFolder, read_run, record_path


class Typed:
    """What a command said, and how it ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def desk(tmp_path: Path, recipe, monkeypatch: pytest.MonkeyPatch, capsys) -> Iterator[Callable[..., Typed]]:
    """A folder with a recipe and no site's settings, and a way to type commands in it; jobs that are left are ended."""
    settings = {"name": "tiny", "train.steps": 3000, "checkpoint.every_steps": 1000, "checkpoint.memory_every_steps": 5}
    (tmp_path / "r.toml").write_text(to_toml(recipe(settings)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)

    def type_(*words: str) -> Typed:
        monkeypatch.setattr(sys, "argv", ["headway", *words])
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        return Typed(status, *capsys.readouterr())

    yield type_
    engine = open_engine("local", tmp_path / "runs")
    for folder in (tmp_path / "runs" / ".local" / "jobs").glob("*"):
        engine.cancel(folder.name)
        wait(lambda job=folder.name: engine.status([job])[job].state in ("cancelled", "finished", "failed"))


def wait(there: Callable[[], object]) -> None:
    eventually(there, poll_s=0.2)


def steps(run: Path) -> int:
    records = [record for record in read_run(RunFolder(run)) if record.header.process == "rank-0"]
    return sum(event["kind"] == "step" for record in records for event in record.events)


def test_a_run_from_submit_to_its_end(desk, tmp_path: Path) -> None:
    done = desk("submit", "r.toml", "--on", "cpux1", "--name", "a", "--set", "train.steps=6", "--json")
    assert (done.json["run"], done.json["engine"], done.json["on"]) == ("a", "local", "cpux1x1")
    again = desk("submit", "r.toml", "--on", "cpux1", "--name", "a")
    assert (again.status, "run a already exists" in again.err) == (2, True)
    refused = desk("requeue", "a")
    assert refused.status == 0 or "already" in refused.err  # it runs, and is told to save, or waits
    said = desk("logs", "a", "--follow").out
    assert "a: finished at step 6 of 6" in said
    (job,) = desk("jobs", "--json").json
    assert (job["run"], job["state"], job["exit_status"]) == ("a", "finished", 0)
    table = desk("jobs").out
    assert "finished" in table
    assert max(map(len, table.splitlines())) <= 80
    assert desk("runs", "--json").json[0]["state"] == "finished"
    assert desk("cancel", "a", "--json").json["state"] == "finished"


@pytest.mark.slow
def test_requeue_saves_and_restarts_then_cancel(desk, tmp_path: Path) -> None:
    desk("submit", "r.toml", "--on", "cpux1", "--name", "b")
    run = tmp_path / "runs" / "b"
    wait(lambda: steps(run) > 10)
    assert desk("requeue", "b").status == 0
    wait(lambda: desk("jobs", "--json").json[0]["starts"] == 2 and steps(run) > 30)
    assert desk("cancel", "b", "--json").json["state"] in ("ending", "cancelled")
    wait(lambda: desk("jobs", "--json").json[0]["state"] == "cancelled")
    assert desk("runs", "--json").json[0]["state"] == "stopped"
    first = desk("jobs", "--json").json[0]["job"]
    assert desk("requeue", "b", "--json").json["job"] != first
    again = desk("requeue", "b", "--avoid", "elsewhere")
    assert again.status == 1
    assert "already" in again.err
    assert len((run / "jobs.jsonl").read_text().splitlines()) == 2


def test_waiting_run_is_listed_as_submitted(desk, tmp_path: Path) -> None:
    cpus = open_engine("local", tmp_path / "runs").inventory()[0].cpus
    for name in ("c", "d"):
        assert desk("submit", "r.toml", "--on", f"cpux{cpus}", "--name", name).status == 0
    jobs = {job["run"]: job["state"] for job in desk("jobs", "--json").json}
    assert jobs == {"c": "running", "d": "waiting"}
    assert {run["name"]: run["state"] for run in desk("runs", "--json").json}["d"] == "submitted"
    assert "already" in desk("requeue", "d").err
    assert desk("cancel", "d", "--json").json["state"] == "cancelled"
    first = {job["run"]: job["job"] for job in desk("jobs", "--json").json}["d"]
    assert desk("requeue", "d", "--json").json["job"] != first
    assert {job["run"]: job["state"] for job in desk("jobs", "--json").json}["d"] == "waiting"
    again = desk("requeue", "d", "--avoid", "elsewhere")
    assert (again.status, "already" in again.err) == (1, True)
    assert len((tmp_path / "runs" / "d" / "jobs.jsonl").read_text().splitlines()) == 2
    assert desk("cancel", "c", "--json").json["state"] in ("ending", "cancelled")


def test_a_dry_run_leaves_nothing(desk, tmp_path: Path) -> None:
    done = desk("submit", "r.toml", "--on", "cpux1", "--name", "e", "--dry-run")
    assert "agent --run e --runs" in done.out
    assert not [path for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")]
    assert desk("jobs").out.startswith("no submitted runs in runs")


def test_spares_are_requested_and_passed_to_agents(desk, tmp_path: Path) -> None:
    (tmp_path / "config/headway").mkdir(parents=True)
    site = f'[kubernetes]\nimage = "headway"\nclaim = "runs"\nmount = "{tmp_path}"\n'
    (tmp_path / "config/headway/engines.toml").write_text(site)
    done = desk("submit", "r.toml", "--on", "cpux1x2", "--spares", "1", "--engine", "kubernetes", "--dry-run")
    job = json.loads(done.out)["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == 3
    words = " ".join(job["template"]["spec"]["containers"][0]["command"])
    assert all(pair in words for pair in ("--nodes 2", "--workers 2", "--spares 1")), words


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--on", "cpux1", "--spares", "1"], "asks for 2 machines; this machine has 1"),
        (["--on", "cpux1x2"], "asks for 2 machines; this machine has 1"),
        (["--on", "h100x8"], "asks for 8 GPUs"),
        (["--on", "h100x3"], "or 2 GPUs in --on"),  # submit takes no --workers
        (["--on", "cpux1x3"], "or 2 or 4 machines in --on"),
        (["--on", "cpux1", "--engine", "slrm"], "did you mean slurm"),
        (["--on", "cpux1", "--set", "train.device=cuda"], "train.device is cuda"),
        (["--on", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_submitted(desk, tmp_path: Path, words: list[str], told: str) -> None:
    done = desk("submit", "r.toml", *words)
    assert done.status in (1, 2)
    assert told in done.err
    assert desk("runs").out.startswith("no runs")


def test_runs_without_a_job_are_errors(desk, tmp_path: Path, recipe) -> None:
    assert desk("cancel", "last").status == 2
    desk("submit", "r.toml", "--on", "cpux1", "--name", "f")
    desk("cancel", "f")
    (tmp_path / "runs" / "f" / "jobs.jsonl").unlink()
    done = desk("cancel", "f")
    assert (done.status, "was not submitted" in done.err) == (2, True)
    done = desk("requeue", "f")
    assert (done.status, "was not submitted" in done.err) == (2, True)
    assert done.err.splitlines()[-1].split() == ["hint:", *["headway", "resume", "f"]]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes fake Slurm commands, first in PATH: `slurm(squeue="echo ...")`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def write(**commands: str) -> None:
        for name, script in commands.items():
            (folder / name).write_text(f"#!/bin/bash\n{script}\n")
            (folder / name).chmod(0o755)

    write(
        scontrol="echo Slurmctld at here is UP",
        sinfo='case "$*" in *Format=*) echo "n0|idle|8|1000|(null)|(null)|all*|none|";; *) echo "all*|infinite";; esac',
        sbatch=f"echo >>{tmp_path}/submitted; wc -l <{tmp_path}/submitted",
        sacct="exit 1",
        squeue="echo slurm_load_jobs error: Invalid job id specified >&2; exit 1",
    )
    return write


def test_unreachable_engine_is_named_and_the_others_are_listed(desk, slurm, tmp_path: Path) -> None:
    assert desk("submit", "r.toml", "--engine", "slurm", "--on", "cpux1", "--name", "s").status == 0
    assert desk("submit", "r.toml", "--on", "cpux1", "--name", "l", "--set", "train.steps=3").status == 0
    slurm(scontrol='echo "Slurmctld(primary) at here is DOWN"', squeue="sleep 1000", sinfo="sleep 1000")
    jobs = {job["run"]: job for job in desk("jobs", "--json").json}
    assert jobs["s"]["state"] == "unknown"
    assert 'Slurm is down: scontrol ping printed "Slurmctld(primary) at here is DOWN"' in jobs["s"]["unreachable"]
    assert (jobs["l"]["state"] != "unknown", jobs["l"]["unreachable"]) == (True, None)
    with Recorder(record_path(tmp_path / "runs" / "s" / "events", 1, "agent"), attempt=1, process="agent") as agent:
        agent.event("attempt", workers=1, device="cpu")
        agent.event("end", outcome="finished", reason="all steps done")
    finished = next(job for job in desk("jobs", "--json").json if job["run"] == "s")
    assert (finished["state"], finished["reason"]) == ("finished", "all steps done (from its records)")
    assert finished["unreachable"], "its engine still does not answer"
    table = desk("jobs").out
    assert "slurm is unreachable: Slurm is down" in table
    assert max(map(len, table.splitlines())) <= 80
    for words in (
        ["cancel", "s"],
        ["requeue", "s"],
        ["nodes", "--engine", "slurm"],
        ["submit", "r.toml", "--engine", "slurm", "--on", "cpux1", "--name", "t"],
        ["submit", "r.toml", "--engine", "slurm", "--on", "cpux1", "--name", "t", "--dry-run"],
    ):
        refused = desk(*words)
        assert (refused.status, "Slurm is down" in refused.err, "hint:" in refused.err) == (1, True, True), words
    assert not (tmp_path / "runs" / "t").exists()


def test_engine_without_an_address_in_this_shell_leaves_the_others_listed(
    desk, slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("r", "s"):
        assert desk("submit", "r.toml", "--engine", "slurm", "--on", "cpux1", "--name", name).status == 0
    slurm(squeue="echo '1|PENDING|Resources|(null)|0|0|(null)'")
    folder = tmp_path / "runs" / "r"
    submission = last_submission(folder)
    assert submission is not None
    note_submission(folder, replace(submission, engine="ray", job="0303818f"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    listed = desk("jobs", "--json")
    assert listed.status == 0, listed.err
    jobs = {job["run"]: job for job in listed.json}
    assert (jobs["r"]["state"], jobs["r"]["unreachable"]) == ("unknown", "no Ray cluster is named")
    assert jobs["s"]["unreachable"] is None
    assert "ray is unreachable: no Ray cluster is named\nhint:  set RAY_ADDRESS" in desk("jobs").out
    for verb in ("cancel", "requeue"):
        refused = desk(verb, "r")
        assert (refused.status, "no Ray cluster is named" in refused.err) == (2, True), verb
    (tmp_path / "config" / "headway").mkdir(parents=True)
    (tmp_path / "config" / "headway" / "engines.toml").write_text("[ray]\naddres = 'local'\n")
    mistaken = desk("jobs")
    assert (mistaken.status, "[ray] has no key 'addres'" in mistaken.err) == (2, True)


def test_job_that_its_engine_does_not_know_is_requeued(desk, slurm, tmp_path: Path) -> None:
    first = desk("submit", "r.toml", "--engine", "slurm", "--on", "cpux1", "--name", "s", "--json").json["job"]
    assert desk("jobs", "--json").json[0]["state"] == "unknown"
    slurm(squeue="echo slurm_load_jobs error: Socket timed out >&2; exit 1")
    assert "Socket timed out" in desk("requeue", "s").err  # it may well run
    slurm(squeue="echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    assert desk("requeue", "s", "--json").json["job"] != first


@pytest.mark.parametrize("name", ["s", "a-run-with-a-long-name-" + "x" * 40])
def test_held_job_is_shown_with_the_command_that_releases_it(desk, slurm, tmp_path: Path, name: str) -> None:
    job = desk("submit", "r.toml", "--engine", "slurm", "--on", "cpux1", "--name", name, "--json").json["job"]
    (folder,) = (tmp_path / "runs" / name / "jobs").iterdir()
    (folder / "starts").write_text("1 n0,n1,n2,n3,n4,n5\n")
    (folder / "ended").write_text("1 75\n")
    begin = time.time() + 100
    slurm(
        squeue=f"echo '{job}|PENDING|BeginTime|{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(begin))}'",
        scontrol=f'echo "$@" >>{tmp_path}/acts; echo Slurmctld at here is UP',
    )
    held = f"held by Slurm until {time.strftime('%H:%M', time.localtime(begin))}"
    table = desk("jobs").out
    assert f"{held}; headway requeue {name}" in " ".join(table.split())
    assert max(len(line) for line in table.splitlines() if "headway" not in line) <= 80
    assert sum(f"headway requeue {name}" in line for line in table.splitlines()) == 1, "a command is not broken"
    (shown,) = desk("jobs", "--json").json
    assert (shown["reason"], shown["remedy"]) == (held, "requeue")
    assert set((tmp_path / "acts").read_text().splitlines()) == {"ping"}, "queries change nothing"
    assert desk("requeue", name).status == 0
    assert f"update JobId={job} StartTime=now+" in (tmp_path / "acts").read_text()
    refused = desk("requeue", name, "--avoid", "n0")
    assert (refused.status, "already waiting" in refused.err) == (1, True)


def test_machines_are_listed(desk) -> None:
    (machine,) = desk("nodes", "--json").json
    assert machine["cpus"] >= 1
    assert machine["name"] in desk("nodes").out


SITE = """
[slurm]
partition = "gpu"
account = "ml"
switches = 1
setup = ["module load cuda"]
secrets = ["HF_TOKEN"]
environment = { NCCL_DEBUG = "WARN" }
cpus = 12
grace_s = 90
"""


def test_settings_of_a_site_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "engines.toml"
    file.write_text(SITE)
    monkeypatch.setenv("HEADWAY_ENGINES", str(file))
    found = engine_settings("slurm")
    assert found.site == {"partition": "gpu", "account": "ml", "switches": "1"}
    assert (found.setup, found.secrets, found.cpus, found.grace_s) == (("module load cuda",), ("HF_TOKEN",), 12, 90)
    assert engine_settings("local").site == {}
    for text, word in [
        ("[slurm]\npartitoin = 'gpu'", "partition"),
        ("[slrum]\n", "slurm"),
        ("[local]\npartition = 'gpu'", "partition"),
        ("[slurm]\nsetup = 'x'", "list of lines"),
        ("[slurm]\nsecrets = [1]", "quotes"),
        ("[slurm]\naccount = ['a']", "account"),
        ("[slurm", "cannot read"),
    ]:
        file.write_text(text)
        with pytest.raises(UsageError) as told:
            engine_settings("slurm" if "local" not in text else "local")
        assert word in f"{told.value.message} {told.value.hint}"
    monkeypatch.setenv("HEADWAY_ENGINES", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="HEADWAY_ENGINES"):
        engine_settings("slurm")
