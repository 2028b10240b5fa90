"""Every example runs as it stands, in an empty folder."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
EXPECTED = {
    "from_python.py": "finished, all steps done",
    "jsonl_with_prompts.py": "were trained on in the first; the rest are prompts",
    "plan_from_python.py": "shard 4 tensor 8: ",
    "read_checkpoint.py": "20 weights, 60 tensors of the optimizer",
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


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    assert EXPECTED[name] in run(name, tmp_path)
    assert (tmp_path / "runs").is_dir() == (name != "plan_from_python.py")  # a plan runs nothing


def test_reading_a_checkpoint_imports_nothing_of_headway() -> None:
    tree = ast.parse((EXAMPLES / "read_checkpoint.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in names if name.split(".")[0] == "headway"}
