"""Every example runs as it stands, in an empty folder."""

import ast
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.data import BuildOptions, build
from headway.track import RunFolder, read_metric

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
EXPECTED = {
    "from_python.py": "finished, all steps done",
    "jsonl_with_prompts.py": "were trained on in the first; the rest are prompts",
    "mixture.py": "step 24: loss ",
    "plan_from_python.py": "shard 4 tensor 8: ",
    "read_checkpoint.py": "20 weights, 60 tensors of the optimizer",
    "survive_a_kill.py": "equal: 20 common steps, 2 common checkpoints",
}


def run(name: str, folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADWAY_")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tried() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "demo.py"}  # `make demo` tries the demo


LONG = ("jsonl_with_prompts.py", "mixture.py", "survive_a_kill.py")
"""What they show is tested in seconds elsewhere: in test_gradients.py, test_data_mixtures.py and test_exact.py."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in sorted(EXPECTED)]
)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    assert EXPECTED[name] in run(name, tmp_path)
    assert (tmp_path / "runs").is_dir() == (name != "plan_from_python.py")  # a plan runs nothing


def test_a_class_of_ones_own_is_trained_from_a_package_beside_its_recipe(tmp_path: Path) -> None:
    folder = EXAMPLES / "own_model"
    build(tmp_path / "data" / "json-package", [f"{Path(json.__file__).parent}/*.py"], BuildOptions(vocab_size=512))
    environment = os.environ | {"PYTHONPATH": str(folder), "HEADWAY_RUNS": str(tmp_path / "runs")}
    program = "from headway.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(folder / "recipe.toml"), "--name", "own", "--workers", "2"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "own: finished at step 20 of 20" in done.stdout
    losses = read_metric(RunFolder(tmp_path / "runs" / "own"), "loss")[1]
    assert abs(losses[0] - math.log(512)) < 0.1, "a fresh model knows nothing: its loss is the vocabulary's"
    assert losses[-1] < losses[0] - 0.5


def test_the_example_of_a_class_knows_nothing_of_headway() -> None:
    for path in (EXAMPLES / "own_model").rglob("*.py"):
        modules = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert "headway" not in "".join(ast.unparse(node) for node in modules)


def test_reading_a_checkpoint_imports_nothing_of_headway() -> None:
    tree = ast.parse((EXAMPLES / "read_checkpoint.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in names if name.split(".")[0] == "headway"}
