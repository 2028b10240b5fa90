"""Rules of the codebase: who may import whom, what starts without torch, which names are unique."""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import headway

SOURCE = Path(headway.__file__).parent
# Imports go down these lists, never up; packages on one line may not import each other.
CONTROL = [
    {"__main__", "api"},
    {"cli"},
    {"dashboard"},
    {"cluster", "chaos"},
    {"agent"},
    {"plan", "rl"},
    {"evals"},
    {"state", "data"},
    {"track", "hardware"},
    {"recipe"},
]
TENSOR = [{"train", "measure"}, {"inference"}, {"parallel"}, {"models"}, {"kernels"}]
BOTH = {"policy_client"}
"""Both sides in one process, for loops of the user's own; nothing else imports it."""
BASE = {"errors", "callable_package", "frozen_heap", "http_server", "__init__"}
CONTROL_SIDE = set.union(*CONTROL)
TENSOR_SIDE = set.union(*TENSOR)
NEVER_FROM_TENSOR_SIDE = {"agent", "cluster", "cli", "dashboard"}
KNOWS_TORCH = {"state/tensors.py"}

FILES = sorted(path for path in SOURCE.rglob("*.py"))
VERBS = [
    ["--help"], ["--version"], ["plan", "--help"], ["plan", "recipes/demo.toml", "--on", "cpu"], ["plan", "none.toml"],
    ["plan", "recipes/demo.toml", "--serve", "--on", "cpu"], ["plan", "none", "--serve"],
    ["train", "--help"], ["resume", "--help"], ["stop", "--help"], ["runs"],
    ["hardware", "show"],
    ["report", "last"], ["metrics", "last", "--key", "loss"], ["metrics", "a", "b"],
    ["compare", "a", "b"], ["runs", "--where", "loss < 3"], ["runs", "tag", "a", "b"], ["runs", "rm", "a"],
    ["logs", "last"], ["diff", "a", "b"],
    ["rl", "samples", "last"], ["rl", "mismatch", "last", "--step", "1"], ["rl", "replay", "last", "--step", "1"],
    ["serve", "none"], ["ui", "--host", "0.0.0.0"],
    ["generate", "none", "in.jsonl", "--out", "out.jsonl"],
    ["eval", "none", "--tasks", "none.jsonl"], ["eval", "--compare", "a", "b"],
    ["sample", "--help"], ["recipe", "schema"], ["recipe", "show", "recipes/demo.toml"], ["data", "show", "none"],
    ["recipe", "ls"], ["recipe", "cp", "none"], ["data", "probe", "none"],
    ["data", "build", "none"], ["data", "verify", "none"], ["data", "diff", "a", "b"], ["data", "build", "x", "hf:a b"],
    ["explain", "last", "1"], ["lineage", "last"], ["model", "ls"], ["model", "tag", "last", "prod"],
    ["checkpoint", "ls", "last"],
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
    ["doctor", "--sandbox"],
    ["submit", "none.toml", "--on", "cpu"], ["submit", "recipes/demo.toml", "--on", "cpu", "--set", "data.path=none"],
    ["sweep"], ["sweep", "none"], ["sweep", "none.toml", "--grid", "seed=1,2"],
    ["sweep", "recipes/demo.toml", "--grid", "seed=1,2", "--set", "data.path=none"],
    ["up", "--tls-cert", "none"], ["node", "token"], ["node", "rm", "n"], ["node", "run", "--folder", "none"],
    ["node", "join", "http://localhost:1", "--token-file", "none"], ["drain", "n"], ["drain", "n", "--at", "never"],
    ["queue"], ["why", "job"], ["hold", "job"], ["release", "job"],
    ["submit", "--", "true"], ["nodes", "--engine", "service"],
    ["events"], ["priority", "job", "1"], ["port-forward", "job", "6006"], ["port-forward", "job", "x"],
    ["usage"], ["simulate", "--from-live", "--policy", "fifo"],
    ["login", "http://host:1", "--token-file", "none"], ["whoami"], ["users"], ["tokens"], ["tokens", "add"],
    ["tenants"], ["budget"], ["secrets", "ls"], ["secrets", "set", "x"], ["events", "--audit"],
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
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    modules = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


PACKAGES = sorted({package_of(path) for path in FILES})


def allowed(package: str) -> set[str]:
    """The packages that a package may import."""
    for side, below in ((CONTROL, set()), (TENSOR, CONTROL_SIDE - NEVER_FROM_TENSOR_SIDE)):
        for level, packages in enumerate(side):
            if package in packages:
                return {package} | BASE | below | set().union(*side[level + 1 :])
    if package in BOTH:
        return {package, "agent"} | BASE | TENSOR_SIDE | (CONTROL_SIDE - NEVER_FROM_TENSOR_SIDE)
    return BASE if package in BASE else set()


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down(package: str) -> None:
    assert package in CONTROL_SIDE | TENSOR_SIDE | BOTH | BASE, f"{package} has no place in the layers above"
    for path in files_of(package):
        imported = {module.split(".")[1] for module in imports_of(path) if module.startswith("headway.")}
        imported -= {"__version__"}
        if package in ("__init__", "api"):
            imported -= {"api", "inference", "policy_client", "track"}  # for type checkers; imported when they are used
        assert imported <= allowed(package), f"{path.name} must not import {sorted(imported - allowed(package))}"


@pytest.mark.parametrize("package", [package for package in PACKAGES if package in CONTROL_SIDE])
def test_control_side_never_imports_torch(package: str) -> None:
    for path in files_of(package):
        if str(path.relative_to(SOURCE)) not in KNOWS_TORCH:
            assert not [module for module in imports_of(path) if module.split(".")[0] == "torch"], path


RUN_VERBS = """
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
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Exit status and standard error of each verb, in a process where importing torch is an error."""
    folder = tmp_path_factory.mktemp("without-torch")
    (folder / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{folder}:{SOURCE.parent}",
        "HEADWAY_RUNS": str(folder / "runs"),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN_VERBS],
        input=json.dumps(VERBS), env=environment, cwd=SOURCE.parent.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(VERBS)
    return results


@pytest.mark.parametrize("number", range(len(VERBS)), ids=[" ".join(verb) for verb in VERBS])
def test_verbs_start_without_torch(outcomes: list[tuple[int, str]], number: int) -> None:
    """Each verb runs, or fails with a message."""
    status, error = outcomes[number]
    assert "torch was imported" not in error
    assert "Traceback" not in error, error
    assert status in (0, 1, 2)
    if status:
        assert "error: " in error.lower()


def test_every_package_lists_its_contents() -> None:
    for init in SOURCE.glob("*/__init__.py"):
        tree = tree_of(init)
        assert ast.get_docstring(tree), init
        lists = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        ]
        # also those that are imported when they are used, which stand under `if TYPE_CHECKING`
        imports = [
            n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("headway")
        ]
        names = {a.asname or a.name for n in imports for a in n.names}
        if names:
            assert lists, init
            assert set(lists[0]) == names, init


FUNCTION_IMPORTS = {
    "checkpoint_export.py": "headway.data.tokenizer loads the tokenizers library; only export and import need it",
    "model.py": "headway.agent takes 0.35 s to import; only recipes with model.init need it",
    "node.py": "cryptography, fastapi and sqlalchemy are an extra; without them the verb says what to install",
    "plan_request.py": "headway.agent takes 0.35 s to import; only recipes with model.init need it",
    "submit.py": "headway.recipe and what submits runs take 0.4 s to import; commands need neither",
    "report.py": "headway.data imports NumPy, which takes 0.1 s; only runs with loss spikes need it",
    "up.py": "fastapi, sqlalchemy and uvicorn are an extra; without them the verb says what to install",
    "ui.py": "fastapi and uvicorn are an extra; without them the verb says what to install",
    "run_sync.py": "headway.agent takes 0.35 s to import; only runs on other machines need it",
}
"""Files of cli/ that import Headway's modules inside functions, and why; all others do so at their top."""


def test_cli_imports_at_the_top() -> None:
    """`headway.cli.lazy` imports a verb's module when the verb is called, so imports at the top cost others nothing."""
    inside = {
        path.name
        for path in files_of("cli")
        for function in ast.walk(tree_of(path))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("headway")
    }
    assert inside == set(FUNCTION_IMPORTS)


def test_public_class_names_are_unique() -> None:
    """Family files have classes of the same names by design."""
    places = defaultdict(list)
    for path in FILES:
        relative = path.relative_to(SOURCE)
        if relative.parts[0] == "models" or relative.parts[:2] == ("recipe", "families"):
            continue
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(relative))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_packages_export_no_function_named_like_one_of_their_modules() -> None:
    for init in SOURCE.rglob("__init__.py"):
        modules = {
            path.stem for path in init.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
        }
        package = ".".join(["headway", *init.parent.relative_to(SOURCE).parts])
        exported = {
            alias.asname or alias.name
            for node in tree_of(init).body
            if isinstance(node, ast.ImportFrom) and node.module != package
            for alias in node.names
        }
        assert not exported & modules, f"{package} exports {sorted(exported & modules)}, which are also its modules"


VAGUE = {"one", "found", "told", "made", "said", "ours", "theirs", "whom", "lived", "heard", "thing"}
WRITTEN_FIELDS = {
    ("chaos/matrix.py", "said"): "headway chaos --json",
    ("cluster/engines/local/jobs.py", "told"): "job.json of the local engine",
    ("cluster/engines/slurm/site_advice.py", "found"): "headway doctor --engine slurm --json",
}
"""Fields with such names that are part of a format, and of which."""


def bound_name(node: ast.AST) -> str | None:
    """The variable, parameter, attribute or alias that a node binds."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.alias(asname=name):
            return name
        case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return name
    return None


def test_names_say_what_they_hold() -> None:
    """Variables, parameters and attributes are called `checkpoint` or `events`, not `one` or `found`."""
    vague = {
        (str(path.relative_to(SOURCE)), name): node
        for path in FILES
        for node in ast.walk(tree_of(path))
        if (name := bound_name(node)) is not None and name.lstrip("_") in VAGUE
    }
    assert set(WRITTEN_FIELDS) <= set(vague), "remove from WRITTEN_FIELDS what is gone"
    unwanted = [f"{file}:{vague[file, name].lineno}: {name}" for file, name in sorted(set(vague) - set(WRITTEN_FIELDS))]
    assert not unwanted, unwanted


def module_name(path: Path) -> str:
    parts = ["headway", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, without those for type checkers alone."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from statements(getattr(node, block, []))


def defining_module(module: str, name: str) -> str | None:
    """The module that `from module import name` needs: what a package re-exports is looked up where it is defined."""
    if f"{module}.{name}" in MODULES:
        return f"{module}.{name}"
    path = MODULES.get(module)
    if path is None or path.name != "__init__.py":
        return module if path else None
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and node.module != module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return defining_module(str(node.module), alias.name)
    return module


def imported_at_top(path: Path) -> set[str]:
    """Headway's modules that a module imports as it is imported itself."""
    targets = set[str | None]()
    for node in statements(tree_of(path).body):
        if isinstance(node, ast.ImportFrom):
            targets |= {defining_module(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names if alias.name in MODULES}
    return {target for target in targets if target is not None} - {module_name(path)}


def test_no_import_cycles() -> None:
    """Remove modules whose imports are all removed, again and again: what is left is in a cycle or imports one."""
    left = {name: imported_at_top(path) for name, path in MODULES.items() if path.name != "__init__.py"}
    left = {name: targets & set(left) for name, targets in left.items()}
    while free := {name for name, targets in left.items() if not targets & set(left)}:
        left = {name: targets for name, targets in left.items() if name not in free}
    while unused := set(left) - {target for targets in left.values() for target in targets}:
        left = {name: targets for name, targets in left.items() if name not in unused}
    assert not left, {name: sorted(targets & set(left)) for name, targets in left.items()}
