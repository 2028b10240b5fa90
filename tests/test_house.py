"""The rules of the house: who may import whom, and what starts without torch."""

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import headway

SOURCE = Path(headway.__file__).parent
# Imports go down these lists and never up; packages that share a line may not import each other.
CONTROL = [
    {"cli", "dashboard"},
    {"cluster", "chaos"},
    {"agent"},
    {"plan"},
    {"state", "data"},
    {"track", "hardware"},
    {"recipe"},
]
TENSOR = [{"train", "inference", "measure"}, {"parallel"}, {"models"}, {"kernels"}]
BASE = {"errors", "__init__"}
CONTROL_SIDE = set.union(*CONTROL)
TENSOR_SIDE = set.union(*TENSOR)
NEVER_FROM_TENSOR_SIDE = {"agent", "cluster", "cli", "dashboard"}
KNOWS_TORCH = {"state/tensors.py"}

FILES = sorted(path for path in SOURCE.rglob("*.py"))
VERBS = [
    ["--help"], ["--version"], ["plan", "--help"], ["plan", "recipes/demo.toml", "--on", "cpu"], ["plan", "none.toml"],
    ["train", "--help"], ["resume", "--help"], ["stop", "--help"], ["runs"],
    ["hardware", "show"],
    ["report", "last"], ["metrics", "last", "--key", "loss"], ["logs", "last"], ["diff", "a", "b"],
    ["sample", "--help"], ["recipe", "schema"], ["recipe", "show", "recipes/demo.toml"], ["data", "show", "none"],
    ["data", "build", "none"], ["data", "verify", "none"], ["checkpoint", "ls", "last"],
    ["checkpoint", "verify", "last"], ["checkpoint", "show", "last"], ["checkpoint", "diff", "a", "b"],
    ["checkpoint", "export", "last", "out"], ["checkpoint", "import", "none"],
    ["train", "recipes/demo.toml", "--set", "data.path=none"],
    ["resume", "last"], ["stop", "last"], ["agent", "--run", "last"], ["fetch", "last"],
    ["ps"], ["kernels", "--help"], ["stacks", "last"], ["chaos", "none.toml"],
    ["model", "show", "recipes/demo.toml"], ["model", "show", "none"], ["model", "diff", "recipes/demo.toml", "none"],
    ["simulate", "--help"], ["simulate", "none.csv", "--on", "a100x8x4"],
    ["trace", "import", "none", "out.csv"], ["replay", "none"], ["why", "job", "--from", "none"],
    ["check", "--help"], ["check", "none.toml", "--mesh", "shard=2"],
    ["doctor"], ["doctor", "--network"], ["doctor", "--storage", "none"],
    ["submit", "none.toml", "--on", "cpu"], ["submit", "recipes/demo.toml", "--on", "cpu", "--set", "data.path=none"],
    ["sweep"], ["sweep", "none"], ["sweep", "none.toml", "--grid", "seed=1,2"],
    ["sweep", "recipes/demo.toml", "--grid", "seed=1,2", "--set", "data.path=none"],
    ["jobs"], ["cancel", "last"], ["requeue", "last"], ["nodes"], ["nodes", "--engine", "none"],
    ["doctor", "--engine", "slurm"],
    ["cluster", "slurm-template", "none", "--controller", "a b"],
]  # fmt: skip


def package_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def files_of(package: str) -> list[Path]:
    return [path for path in FILES if package_of(path) == package]


@cache
def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


PACKAGES = sorted({package_of(path) for path in FILES})


def allowed(package: str) -> set[str]:
    """The packages that one may import."""
    for side, below in ((CONTROL, set()), (TENSOR, CONTROL_SIDE - NEVER_FROM_TENSOR_SIDE)):
        for level, packages in enumerate(side):
            if package in packages:
                return {package} | BASE | below | set().union(*side[level + 1 :])
    return BASE if package in BASE else set()


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down(package: str) -> None:
    assert package in CONTROL_SIDE | TENSOR_SIDE | BASE, f"{package} is not a room of the house"
    for path in files_of(package):
        ours = {module.split(".")[1] for module in imports_of(path) if module.startswith("headway.")}
        ours -= {"__version__"}
        assert ours <= allowed(package), f"{path.name} must not import {sorted(ours - allowed(package))}"


@pytest.mark.parametrize("package", [package for package in PACKAGES if package in CONTROL_SIDE])
def test_the_control_side_never_imports_torch(package: str) -> None:
    for path in files_of(package):
        if str(path.relative_to(SOURCE)) not in KNOWS_TORCH:
            assert not [module for module in imports_of(path) if module.split(".")[0] == "torch"], path


ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys, traceback
from headway.cli.main import main
for verb in json.load(sys.stdin):
    status, out, err, sys.argv = 0, io.StringIO(), io.StringIO(), ["headway", *verb]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
        except BaseException:
            traceback.print_exc()
    print(json.dumps([status, err.getvalue()]))
"""


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Status and standard error of each verb, in a process where importing torch is an error, again each time."""
    folder = tmp_path_factory.mktemp("without-torch")
    (folder / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{folder}:{SOURCE.parent}",
        "HEADWAY_RUNS": str(folder / "runs"),
    }
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER],
        input=json.dumps(VERBS), env=environment, cwd=SOURCE.parent.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(VERBS)
    return found


@pytest.mark.parametrize("number", range(len(VERBS)), ids=[" ".join(verb) for verb in VERBS])
def test_verbs_start_without_torch(spoken: list[tuple[int, str]], number: int) -> None:
    """Each verb runs, or fails with a sentence."""
    status, error = spoken[number]
    assert "torch was imported" not in error
    assert "Traceback" not in error, error
    assert status in (0, 1, 2)
    if status:
        assert "error: " in error.lower()


def test_every_package_lists_its_contents() -> None:
    for init in SOURCE.glob("*/__init__.py"):
        tree = ast.parse(init.read_text())
        assert ast.get_docstring(tree), init
        lists = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        ]
        names = {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
        if names:
            assert lists, init
            assert set(lists[0]) == names, init
