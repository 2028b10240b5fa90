"""Tables at 80 columns, whatever the names are."""

from dataclasses import replace
from pathlib import Path

import pytest

from headway.cli.jobs import _table
from headway.cli.text import shortened
from headway.cluster.engines.engine import JobStatus, LaunchRequest
from headway.cluster.engines.submissions import Submission
from headway.cluster.submit.runs import SubmittedRun
from headway.track import RunFolder


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
    assert lines[3].split()[:2] == ["running", engine]


def test_reason_of_a_failed_job_is_not_cut() -> None:
    one = standing("tonight", reason="because " * 20 + "n0:/there/is/its/log")
    failed = SubmittedRun(one.run, one.submission, replace(one.status, state="failed"))
    lines = _table([failed])
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines[2:]).split()) == "on vm; " + "because " * 20 + "n0:/there/is/its/log"


def test_cut_text_ends_with_dots() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abc..."
