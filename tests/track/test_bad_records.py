"""Clocks that jump and runs that vanish: verbs show what they can, or say what is wrong in a sentence."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headway.cli.main import app
from headway.errors import HeadwayError
from headway.track import RunFolder, account, read_run, run_summary
from headway.track import runs as run_folders
from track_runs import line, plain_run, step_line, write_record

VERBS = (
    ["runs", "--columns", "created,age,started,updated,took", "--json"],
    ["runs", "--columns", "created,age,started,updated,took"],
    ["runs", "--where", "age < 1d"],
    ["report", "plain"],
    ["metrics", "plain", "--key", "loss"],
    ["lineage", "plain"],
)


def call(root: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--runs", str(root)])


def two_attempts(root: Path) -> RunFolder:
    run = plain_run(root, [3.0, 2.0, 1.0])
    write_record(run, 2, line("resumed", step=2) + step_line(3, 1.5))
    return run


@pytest.mark.parametrize(("wall", "attempts"), [(-1e10, "*"), (1e18, "*"), (0.0, "0002*"), (1e300, "0002*")])
def test_clocks_that_jump_change_no_metric_and_no_balance(tmp_path: Path, wall: float, attempts: str) -> None:
    run = two_attempts(tmp_path)
    for path in run.events.glob(attempts):  # booted anew, with another date
        text = path.read_text().replace('"wall":1000000000.0', f'"wall":{wall!r}').replace('"boot":"b"', '"boot":"c"')
        path.write_text(text)
        os.utime(path, (2**33, 2**33))
    for words in VERBS:
        result = call(tmp_path, *words)
        assert result.exit_code == 0, (words, result.exception)
    assert call(tmp_path, "metrics", "plain", "--key", "loss").output.split() == ["1", "3", "2", "2", "3", "1.5"]
    ledger = account(read_run(run))
    assert sum(ledger.accounts.values()) == ledger.total_ns
    (row,) = json.loads(call(tmp_path, *VERBS[0]).output)
    assert row["values"]["age"] >= 0


@pytest.mark.parametrize("words", [*VERBS, ["compare", "plain", "other"], ["diff", "plain", "other"]])
def test_run_deleted_after_it_was_found_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    plain_run(tmp_path, [3.0, 2.0], "other")
    two_attempts(tmp_path)
    listed = run_summary.attempt_numbers

    def delete_then_list(run: RunFolder) -> list[int]:
        if run.name == "plain":
            shutil.rmtree(run.path, ignore_errors=True)
        return listed(run)

    monkeypatch.setattr(run_summary, "attempt_numbers", delete_then_list)
    monkeypatch.setattr(run_folders, "attempt_numbers", delete_then_list)
    monkeypatch.setattr(run_folders, "_active", lambda run: (delete_then_list(run), 0)[1])
    result = call(tmp_path, *words)
    assert result.exception is None or isinstance(result.exception, SystemExit | HeadwayError), result.exception
    if isinstance(result.exception, HeadwayError):
        assert "plain" in str(result.exception)
        assert "\n" not in str(result.exception)
