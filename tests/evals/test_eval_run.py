"""A real run, evaluated at two of its checkpoints by the real process."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway import __version__
from headway.track import latest_evaluations, read_metric


def headway(folder: Path, *words: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "headway", *words], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_checkpoints_of_a_run_are_evaluated_recorded_and_compared(
    tmp_path: Path, lab: Any, recipe: Callable[..., Any]
) -> None:
    """Eight steps at a high rate lower the perplexity of the training text by far more than chance."""
    settings = {"checkpoint.every_steps": 1, "checkpoint.keep_last": 20, "train.steps": 8}
    run = lab.train(recipe(settings)).run
    source = Path(json.__file__).with_name("decoder.py").read_text()
    rows = [{"text": text} for text in source.split("\n\n") if text.strip()]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = ("--runs", str(run.path.parent))
    text = headway(tmp_path, "eval", run.name, "--tasks", "code.jsonl", *runs)
    assert text.startswith(f"{run.name}@8: float32 on cpu, {len(rows)} questions in ")
    compared = headway(
        tmp_path, "eval", "--compare", f"{run.name}@1", f"{run.name}@8", "--tasks", "code.jsonl", "--json", *runs
    )
    (comparison,) = json.loads(compared)["comparisons"]
    assert comparison["sentence"].startswith(f"{run.name}@8 is better than {run.name}@1, significant at 5 %")
    steps, bits = read_metric(run, "code/bits_per_byte")
    assert steps.tolist() == [1, 8]
    # A comparison adds up the same rows in another order.
    assert bits.tolist() == pytest.approx([comparison["first"], comparison["second"]], rel=1e-12)
    assert bits[1] < bits[0] - 0.1
    assert {evaluation.version for evaluation in latest_evaluations(run)} == {__version__}
    again = json.loads(headway(tmp_path, "eval", "--compare", f"{run.name}@1", run.name, "--json", *runs))
    assert again["comparisons"] == json.loads(compared)["comparisons"]
    assert re.search(r"evaluations:\n(.*\n)+ +8 code +bits_per_byte ", headway(tmp_path, "report", run.name, *runs))
