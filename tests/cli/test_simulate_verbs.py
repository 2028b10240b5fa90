"""`headway simulate`, `replay`, `why` and `trace import` as a user types them."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from headway.cli.main import main
from headway.cli.simulate import _progress_lines

LOG = "job_id,submit_s,duration_s,num_gpus,vc\n" + "".join(
    f"j{number},{number * 40},{200 + 977 * (number % 7)},{(1, 2, 4, 8, 16)[number % 5]},{'ab'[number % 2]}\n"
    for number in range(60)
)


class Done(NamedTuple):
    """What a command printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


def headway(*words: object, folder: Path) -> Done:
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["headway", *map(str, words)])
        patch.chdir(folder)
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("logs")
    (made / "log.csv").write_text(LOG)
    (made / "gangs.csv").write_text("job_id,submit_s,duration_s,num_gpus\ng,0,60,16\n")
    done = headway("simulate", "log.csv", "--on", "a100x8x3", "--record", "kept", "--plot", "p.png", folder=made)
    assert done.returncode == 0, done.stderr
    (made / "screen.txt").write_text(done.stdout)
    return made


def test_the_table_is_narrow_and_names_all_policies(folder: Path) -> None:
    lines = (folder / "screen.txt").read_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "60 jobs of 2 tenants in 39.3 min, on 24 GPUs (8 per node)"
    assert [line.split()[0] for line in lines[4:8]] == ["headway", "slurm", "kueue", "fifo"]
    assert (folder / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_json_has_every_policy_and_the_bound(folder: Path) -> None:
    done = headway("simulate", "log.csv", "--on", "a100x8x3", "--policy", "headway,fifo", "--json", folder=folder)
    told = json.loads(done.stdout)
    assert list(told["policies"]) == ["headway", "fifo"]
    wanted = {"mean_jct_s", "p99_jct_s", "mean_delay_s", "worst_delay_s", "quota_deficit", "utilization", "preemptions"}
    for numbers in told["policies"].values():
        assert wanted <= set(numbers)
        assert numbers["mean_jct_s"] >= told["without_waiting"]["mean_jct_s"]


def test_oversized_jobs_are_skipped_counted_and_listed(folder: Path) -> None:
    asked = ("simulate", "log.csv", "--on", "a100x8x1", "--policy", "headway,fifo")
    sixteen = [f"j{number}" for number in range(60) if number % 5 == 4]
    done = headway(*asked, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["skipped"] == [f"job {name} requests 16 GPUs; the largest gang is 8" for name in sixteen]
    assert answer["jobs"] == 48
    assert [figures["jobs"] for figures in answer["policies"].values()] == [48, 48]
    lines = headway(*asked, folder=folder).stdout.splitlines()
    assert lines[0].startswith("48 jobs of 2 tenants")
    assert lines[1] == "skipped 12 jobs that cannot run here:"
    assert lines[2] == "  job j4 requests 16 GPUs; the largest gang is 8"
    assert lines[12] == "  and 2 more, which --json lists"


def test_skipped_jobs_do_not_change_the_others(folder: Path) -> None:
    """The same log without its oversized jobs gives the same figures."""
    kept = [line for line in LOG.splitlines() if line.split(",")[3] != "16"]
    (folder / "kept.csv").write_text("\n".join(kept) + "\n")
    both = [
        json.loads(headway("simulate", file, "--on", "a100x8x1", "--policy", "fifo", "--json", folder=folder).stdout)
        for file in ("log.csv", "kept.csv")
    ]
    assert both[0]["policies"] == both[1]["policies"]
    assert both[1]["skipped"] == []


def test_record_is_replayed_and_explained(folder: Path) -> None:
    done = headway("replay", "kept", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("every decision equal") == 4
    told = json.loads(headway("replay", "kept", "--json", folder=folder).stdout)
    assert told["equal"]
    answer = json.loads(
        headway("why", "j30", "--from", "kept", "--at", 1300, "--policy", "fifo", "--json", folder=folder).stdout
    )
    assert answer["state"] in ("waits", "runs", "starts")
    assert answer["sentence"]


def test_waiting_job_gets_a_start_estimate(folder: Path) -> None:
    asked = ("why", "j34", "--from", "kept", "--at", 2100, "--policy", "fifo")
    answer = json.loads(headway(*asked, "--json", folder=folder).stdout)
    assert answer["state"] == "waits"
    assert 0 < answer["start"]["p50_s"] <= answer["start"]["p90_s"]
    assert "(50%), " in headway(*asked, folder=folder).stdout


def test_progress_is_printed_every_ten_seconds_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, 11.0, 11.0, 12.0, 22.0, 22.0])
    progress = _progress_lines(100, lambda: next(times))
    for count in (30, 30, 40, 50):
        progress("slurm", count)
    assert capsys.readouterr().err.splitlines() == [
        "slurm: 60 of 100 jobs",
        "slurm: 50 of 100 jobs, with other limits",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate", "none.csv", "--on", "a100x8x3"], "no such file: none.csv"),
        (["simulate", "log.csv", "--on", "a100x8x3", "--policy", "best"], "unknown policy 'best'"),
        (["simulate", "gangs.csv", "--on", "a100x8x1"], "no job of the trace can run here; job g requests 16 GPUs"),
        (["simulate", "log.csv", "--on", "a100x8x3", "--spares", "3"], "--spares 3 leaves none of 3 nodes"),
        (["simulate", "log.csv", "--on", "abacus"], "abacus"),
        (["simulate", "log.csv"], "no cluster given"),
        (["simulate", "--on", "a100x8x3"], "no job trace given"),
        (
            ["simulate", "log.csv", "--on", "a100x8x3", "--plot", "none/p.png"],
            "--plot none/p.png: no such folder",
        ),
        (["simulate", "log.csv", "--on", "a100x8x3", "--plot", "p.text"], "unknown file type"),
        (["simulate", "log.csv", "--on", "a100x8x3", "--jobs", "9"], "--jobs needs --generate"),
        (["simulate", "log.csv", "--on", "a100x8x3", "--load", "0.8"], "--load needs --generate"),
        (["simulate", "--generate", "acme-like", "--on", "a100x8x3"], "gangs of 1,024 GPUs"),
        (["why", "j30", "--from", "kept", "--policy", "las"], "has no record of las"),
        (["why", "nobody", "--from", "kept", "--at", "1300"], "no job 'nobody'"),
        (["replay", "."], "has no decision logs"),
        (["trace", "import", "none", "out.csv"], "no such file: none"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, words: list[str], said: str) -> None:
    done = headway(*words, folder=folder)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
