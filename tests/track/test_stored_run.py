"""A run that an older Headway recorded (run_format_1, by commit 9fe7371) is still read, compared and resumed.

It has two workers and six steps; worker 1 was killed in step 4, and the run went on from its save of step 2.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import Lab
from headway.cli.main import app
from headway.recipe.load import with_settings
from headway.track import FORMAT, RunFolder, read_metric, read_recipe, read_run

STORED = Path(__file__).parent / f"run_format_{FORMAT}"
EXPECTED = json.loads((STORED / "expected.json").read_bytes())
"""What the Headway that made the run printed about it, and what it got when it resumed a copy."""
REWORDED = ("advice", "reason", "sentence", "text")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A copy of the stored run and of its dataset, which tests may change."""
    shutil.copytree(STORED, tmp_path / "copy")
    return tmp_path / "copy"


def headway(*arguments: str, runs: Path = STORED / "runs") -> Any:
    result = CliRunner().invoke(app, [*arguments, "--runs", str(runs), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def without_sentences(value: Any) -> Any:
    """A document with an ellipsis for each sentence that a later version may word differently."""
    if isinstance(value, dict):
        return {key: ... if key in REWORDED else without_sentences(item) for key, item in value.items()}
    return [without_sentences(item) for item in value] if isinstance(value, list) else value


def recorded(document: dict[str, Any], expected: dict[str, Any]) -> Any:
    """What the document had when the run was stored; later versions may say more."""
    return without_sentences(_of_then(document, expected))


def _of_then(value: Any, expected: Any) -> Any:
    """A value without the keys that dictionaries in it have been given since."""
    if isinstance(value, dict) and isinstance(expected, dict):
        return {key: _of_then(value[key], item) for key, item in expected.items()}
    if isinstance(value, list) and isinstance(expected, list) and len(value) == len(expected):
        return [_of_then(*pair) for pair in zip(value, expected, strict=True)]
    return value


def test_report_of_stored_run_is_unchanged() -> None:
    report = headway("report", "stored")
    assert recorded(report, EXPECTED["report"]) == without_sentences(EXPECTED["report"])
    assert sum(report["accounts_ns"].values()) == report["total_ns"], "what was added since took no time of this run"
    assert [incident["text"][:8] for incident in report["incidents"]] == ["worker 1", "resumed "]


def test_stored_run_equals_its_copy(stored: Path) -> None:
    shutil.copytree(stored / "runs" / "stored", stored / "runs" / "copy")
    comparison = headway("diff", "stored", "copy", runs=stored / "runs")
    assert comparison["equal"], comparison
    expected = EXPECTED["diff"] | {"runs": comparison["runs"]}
    assert recorded(comparison, expected) == without_sentences(expected)


def test_stored_run_resumes_to_the_recorded_chain_and_digest(stored: Path, make_lab: Callable[[Path], Lab]) -> None:
    """The bits of float32 products depend on the machine: where it computes other bits than the one that made the run,
    as an uninterrupted run of today's code shows, only the losses must agree."""
    expected, run = EXPECTED["resumed"], RunFolder(stored / "runs" / "stored")
    settings = [f"train.steps={expected['steps']}", f"data.path={stored / 'dataset'}"]
    uninterrupted = make_lab(stored).train(with_settings(read_recipe(run), settings), workers=2)
    resumed = make_lab(stored).resume(run, *settings)
    assert (resumed.outcome.state, uninterrupted.outcome.state) == ("finished", "finished"), resumed.outcome
    assert {record.header.attempt for record in read_run(run)} == {1, 2, 3}
    for run_result in (resumed, uninterrupted):
        steps, losses = read_metric(run_result.run, "loss")
        assert steps.tolist() == list(range(1, expected["steps"] + 1))
        assert losses == pytest.approx(expected["losses"], rel=1e-4)
    same_machine = uninterrupted.events("step")[5]["chain"] == EXPECTED["report"]["exact"]["chain"]
    if same_machine:
        assert (resumed.chain, resumed.digest) == (expected["chain"], expected["digest"])
        assert (uninterrupted.chain, uninterrupted.digest) == (expected["chain"], expected["digest"])
