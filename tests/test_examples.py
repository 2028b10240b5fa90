"""Every example runs as it stands, in an empty folder."""

import ast
import importlib
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headway.data import BuildOptions, build_dataset
from headway.recipe import load_recipe
from headway.state import CheckpointFacts, Piece, begin_checkpoint, commit, shard_name, write_shard
from headway.track import RunFolder, read_metric

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
EXPECTED = {
    "countdown.py": "data/countdown.jsonl: 2000 problems",
    "make_clips.py": "96 clips of 24 frames, 32 x 32 pixels",
    "make_digits.py": "1797 images of digits with labels 0 to 9",
    "make_chats.py": "conversations, as many pairs and labelled answers, and a chat template",
    "from_python.py": "finished, all steps done",
    "jsonl_with_prompts.py": "were trained on in the first; the rest are prompts",
    "mixture.py": "step 24: loss ",
    "plan_from_python.py": "shard 4 tensor 8: ",
    "policy_loop.py": "step-00000032: the same answers after loading it",
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
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        *EXPECTED,
        "demo.py",
        "mawps.py",
    }  # `make demo` tries the demo


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_what_an_example_imports_of_headway_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "headway":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{path.name}: {node.module} has no {alias.name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """What they show is tested in seconds: here, or in test_gradients.py, test_data_mixtures.py and test_exact.py."""
    assert EXPECTED[name] in run(name, tmp_path)
    run_nothing = ("countdown.py", "plan_from_python.py", "make_chats.py", "make_clips.py", "make_digits.py")
    assert (tmp_path / "runs").is_dir() == (name not in run_nothing)


def test_countdown_problems_are_solvable_and_of_one_seed_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    countdown = importlib.import_module("countdown")
    for numbers in (2, 3, 4):
        made = list(countdown.problems(200, numbers, 12, 0, set()))
        assert made == list(countdown.problems(200, numbers, 12, 0, set()))
        known = {(tuple(sorted(given)), target) for given, target, _ in made}
        others = list(countdown.problems(100, numbers, 12, 1, known))
        assert known.isdisjoint((tuple(sorted(given)), target) for given, target, _ in others)
        assert len(known) == 200
        for given, target, solution in made + others:
            assert len(given) == numbers
            assert sorted(map(int, re.findall("[0-9]+", solution))) == sorted(given)
            assert eval(solution, {"__builtins__": {}}) == target  # digits, signs and brackets
            assert re.fullmatch(r"[-+*()0-9]+", solution)
    row = countdown.row([3, 4], 12, "3*4")
    assert row["messages"][1]["content"] == "<answer>3*4</answer>"
    assert countdown.row([3, 4], 12, None) == {"prompt": "Make 12 from 3, 4.", "numbers": [3, 4], "target": 12}


def test_word_problems_are_held_out_by_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"input": f"What is {number} plus {number % 7}?", "target": number + number % 7} for number in range(40)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows + rows[:5]))
    command = ["mawps.py", str(source), str(tmp_path / "made"), "--hold-out", "10"]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(EXAMPLES / "mawps.py"), run_name="__main__")
    learnt, held = ((tmp_path / "made" / f"{name}.jsonl").read_text().splitlines() for name in ("prompts", "held-out"))
    assert len(held) == 10
    assert {json.loads(line)["question"] for line in held}.isdisjoint(json.loads(line)["prompt"] for line in learnt)
    assert len({json.loads(line)["prompt"] for line in learnt}) == 30


@pytest.mark.parametrize("name", ["make_chats.py", "make_clips.py", "make_digits.py"])
def test_help_of_a_data_script_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == 0
    assert "OUT " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_made_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "plan_from_python.py"), run_name="__main__")
    assert EXPECTED["plan_from_python.py"] in capsys.readouterr().out


def test_a_checkpoint_of_two_workers_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    weight, moment = np.arange(12, dtype="<f4").reshape(4, 3), np.ones(5, "<f4")
    save = begin_checkpoint(tmp_path / "checkpoints", 3)
    shards = [
        write_shard(save.partial, shard_name(rank), [
            Piece("model/w", "float32", (4, 3), (2 * rank, 0), (2, 3), np.ascontiguousarray(weight[2 * rank :][:2])),
            Piece("optimizer/w/exp_avg", "float32", (5,), (3 * rank,), (3 - rank,), moment[: 3 - rank].copy()),
        ])
        for rank in range(2)
    ]  # fmt: skip
    folder = commit(save, CheckpointFacts(cursor=0, chain="c", data_version="v", recipe={}), shards, workers=2)
    monkeypatch.setattr(sys, "argv", ["read_checkpoint.py", str(folder)])
    made = runpy.run_path(str(EXAMPLES / "read_checkpoint.py"), run_name="__main__")
    assert "1 weights, 1 tensors of the optimizer" in capsys.readouterr().out
    tensors = made["read_checkpoint"](folder)
    assert np.array_equal(tensors["model/w"], weight)
    assert np.array_equal(tensors["optimizer/w/exp_avg"], moment)


@pytest.mark.slow
def test_a_class_of_ones_own_is_trained_from_a_package_beside_its_recipe(tmp_path: Path) -> None:
    folder = EXAMPLES / "own_model"
    build_dataset(
        tmp_path / "data" / "json-package", [f"{Path(json.__file__).parent}/*.py"], BuildOptions(vocab_size=512)
    )
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


def test_a_class_of_ones_own_is_built_from_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training one is tested with `custom_models` of tests/train."""
    import torch

    from headway.models.custom import build_own

    monkeypatch.syspath_prepend(str(EXAMPLES / "own_model"))
    model = load_recipe(EXAMPLES / "own_model" / "recipe.toml").model
    torch.manual_seed(0)
    made = build_own(model, "cpu")
    tokens = torch.randint(512, (4, 65))
    loss = torch.nn.functional.cross_entropy(made(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(float(loss.detach()) - math.log(512)) < 0.1, "a fresh model knows nothing: its loss is the vocabulary's"


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
