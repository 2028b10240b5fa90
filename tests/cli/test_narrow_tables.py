"""Tables at 80 columns, whatever the names are, and at 60."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from headway.agent.supervise.worker_stacks import Frame, WorkerStack
from headway.cli.checkpoint_view import list_lines
from headway.cli.diff import diff
from headway.cli.doctor_engine import advice_lines
from headway.cli.hardware import show_command
from headway.cli.jobs import _table
from headway.cli.kernels import _lines
from headway.cli.plan import plan
from headway.cli.report import report
from headway.cli.runs import runs
from headway.cli.stacks import _worker
from headway.cli.text import next_line, shortened, wrap_lines
from headway.cluster.engines.engine import JobStatus, LaunchRequest, State
from headway.cluster.engines.slurm.site_advice import Advice
from headway.cluster.engines.submissions import Submission
from headway.cluster.submit.runs import SubmittedRun
from headway.recipe.shipped import shipped_folder
from headway.track import Recorder, RunFolder, create_run, record_path


def standing(run: str, job: str = "4711", engine: str = "slurm", reason: str = "", on: str = "cpux1x2") -> SubmittedRun:
    request = LaunchRequest(run, ("true",), Path("/nowhere"))
    return SubmittedRun(
        RunFolder(Path(run)), Submission(engine, job, on, request), JobStatus("running", reason, ("vm",))
    )


def test_a_short_name_stands_before_its_job() -> None:
    head, row, under = _table([standing("tonight")])
    assert head.split() == ["run", "state", "engine", "job", "on", "starts", "submitted"]
    assert row.split()[:5] == ["tonight", "running", "slurm", "4711", "cpux1x2"]
    assert row.index("running") == head.index("state")
    assert under == "  on vm"


@pytest.mark.parametrize(
    ("run", "job", "engine"),
    [("a" * 13, "4711", "slurm"), ("a" * 64, "4711_12", "kubernetes"), ("a" * 64, "j" * 50, "ray")],
)
def test_long_names_are_not_cut_and_lines_fit_80_columns(run: str, job: str, engine: str) -> None:
    lines = _table([standing(run, job, engine, "because " * 20), standing("short")])
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith(" ")] == ["run", run, "short"]
    assert lines[1].split()[0] == "state"
    assert lines[lines.index(run) + 1].split()[:2] == ["running", engine]


@pytest.mark.parametrize(("state", "lines_per_job"), [("failed", 2), ("impossible", 3)])
def test_jobs_show_every_column_at_60_columns(state: State, lines_per_job: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    job = standing("tonight", job="b75eadb2", engine="local", on="h100x8x16")
    job = replace(job, status=replace(job.status, state=state, starts=12))
    lines = _table([job])
    head, row = lines[:lines_per_job], lines[lines_per_job : 2 * lines_per_job]
    assert " ".join(head).split() == ["run", "state", "engine", "job", "on", "starts", "submitted"]
    submitted = time.strftime("%m-%d %H:%M", time.localtime(job.submission.time))
    assert " ".join(row).split() == ["tonight", state, "local", "b75eadb2", "h100x8x16", "12", *submitted.split()]
    assert max(map(len, lines)) <= 60
    assert row[-1].index("12") + 2 == head[-1].index("starts") + len("starts")


def test_reason_of_a_failed_job_is_not_cut() -> None:
    one = standing("tonight", reason="because " * 20 + "n0:/there/is/its/log")
    failed = SubmittedRun(one.run, one.submission, replace(one.status, state="failed"))
    lines = _table([failed])
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines[2:]).split()) == "on vm; " + "because " * 20 + "n0:/there/is/its/log"


COMMANDS = [
    "headway requeue RUN --runs /data/team/experiments/2026/november/runs",
    "headway logs tonight --follow --runs /data/team/experiments/runs",
    "headway checkpoint ls s3://bucket/checkpoints/demo-killed@200",
    "headway train --from s3://bucket/checkpoints/a/step-00002000 --name a-2",
    "`headway resume demo --runs '/data/my runs'`",
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [40, 60, 80])
def test_wrapped_text_never_breaks_a_command(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = f"hint: bring the folder back if you have it somewhere, then {command}, which starts the run again there"
    lines = wrap_lines(text, indent=6)
    assert " ".join(line.strip() for line in lines) == text
    assert sum(command in line for line in lines) == 1, lines
    assert max(len(line) for line in lines if command not in line) <= width
    within = [line for line in lines if command in line]
    assert len(within[0]) <= max(width, len(command) + 8), "a long command has a line of its own"


@pytest.mark.parametrize("width", [60, 80])
def test_next_commands_share_a_line_only_where_it_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert next_line("headway jobs", "headway logs a") == "next: headway jobs, headway logs a"
    lines = next_line(*COMMANDS[:3]).splitlines()
    assert [line[6:] for line in lines] == COMMANDS[:3]
    assert [line[:6] for line in lines] == ["next: ", " " * 6, " " * 6]


def test_cut_text_ends_with_dots() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abc..."


@pytest.mark.parametrize("width", [60, 80])
def test_views_of_a_run_fit_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """The table of runs, a report with an incident and a warning, and a comparison."""
    monkeypatch.setenv("COLUMNS", str(width))
    for name, factor in (("tonight-demo-1f2e", 1.0), ("demo-killed", 1.2)):
        run = create_run(tmp_path, "demo", name)
        with Recorder(record_path(run.events, 1, "agent"), attempt=1, process="agent", clock=lambda: 0) as agent:
            agent.event("attempt", at=0, workers=2, device="cpu", from_step=0, recipe_changes={})
            agent.event("hang", at=5, text="worker 1 has been silent for 30 s in forward, at model.py:10 " * 3)
            agent.event("end", at=100 * 10**9, outcome="finished", reason="all steps done")
        with Recorder(record_path(run.events, 1, "rank-0"), attempt=1, process="rank-0", clock=lambda: 0) as worker:
            worker.event("facts", at=1, total_steps=100_000, flops_per_token=60, peak_flops=1e4, peak_source="assumed")
            for step in range(1, 60):
                fields = {"loss": 5.0 * factor if step < 20 else 300.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100}
                at = step * 10**9
                worker.event("step", at=at, step=step, data=1, compute=2, cursor=step, chain=f"{factor}", **fields)
    app = typer.Typer()
    for verb in (runs, report, diff):
        app.command()(verb)
    for words in (["runs"], ["report", "tonight"], ["diff", "tonight", "demo"]):
        output = CliRunner().invoke(app, [*words, "--runs", str(tmp_path)]).output
        lines = [line for line in output.splitlines() if not line.startswith("next: ")]  # a command is not broken
        assert max(map(len, lines)) <= width, output
        assert "tonight-demo-1f2e" in output
    assert "warning: the loss diverges" in CliRunner().invoke(app, ["report", "demo", "--runs", str(tmp_path)]).output
    document = CliRunner().invoke(app, ["report", "demo", "--runs", str(tmp_path), "--json"]).stdout
    assert json.loads(document)["divergence"]["best"] == 6.0


@pytest.mark.parametrize("width", [60, 80])
def test_plans_stacks_and_checkpoints_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    app = typer.Typer()
    app.command()(plan)
    recipe = str(shipped_folder() / "demo.toml")
    for more in ([], ["--sweep", "nodes=1..2"]):
        result = CliRunner().invoke(app, [recipe, "--on", "h100x8x2", *more])
        assert "tokens/s" in result.output, result.output
        assert max(map(len, result.stdout.splitlines())) <= width, result.stdout
    frame = Frame("a_function_with_a_name_of_its_own", "/site-packages/torch/nn/modules/" * 4 + "linear.py", 1234)
    stack = WorkerStack(0, 4711, "S", waits="a_wait_channel", cpu_s=1.0, frames=(frame,), missing=("because " * 30,))
    assert max(map(len, _worker(stack, []))) <= width
    advice = [Advice("AccountingStorageType", "accounting_storage/none", good, "words " * 30) for good in (True, False)]
    assert max(map(len, advice_lines(advice))) <= width
    operation = {"operation": "attention", "case": "documents or windows", "kernel": "pytorch", "why": "words " * 30}
    assert max(map(len, _lines([operation]))) <= width
    capsys.readouterr()
    show_command("h100")
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width
    row = {"step": 200, "tier": "memory", "bytes": 12_620_000, "workers": 8, "saved": 0.0, "digest": "4e8d1cbbe1bcbdfb"}
    lines = list(list_lines([row]))
    assert max(map(len, lines)) <= width
    assert "4e8d1cbbe1bcbdfb" in lines[1]
