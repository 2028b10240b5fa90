"""`headway check` as a person types it, and what it prints."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from eventually import CEILING_S, eventually
from headway.agent.parity import MeshParity, ParityReport
from headway.agent.parity import check_parity as run_check
from headway.agent.parity_compare import KINDS, TOLERANCES, Finding, Verdict
from headway.agent.workers.zygote import ZygoteClient
from headway.cli.check_view import as_json, check_lines
from headway.cli.main import main
from headway.cli.mesh import parse_layout
from headway.errors import UsageError
from headway.recipe import Parallel, to_toml

FLOAT32 = TOLERANCES["float32"]
MINE = """
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Mine(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
"""
RECIPE = """
[model]
class = "mine:Mine"
args = {{ vocabulary = 301, width = 16 }}

[model.layout]
blocks = "blocks"
first = ["tokens"]
last = ["norm", "head"]
columns = ["blocks.*.up"]
rows = ["blocks.*.down"]
vocabulary = ["tokens", "head"]

[data]
path = "{data}"
seq = 16

[train]
batch = 4
"""


@pytest.fixture
def desk(tmp_path: Path, recipe):
    """A folder with a recipe, and a way to type commands in it."""
    (tmp_path / "r.toml").write_text(to_toml(recipe({"name": "tiny"})))
    (tmp_path / "temporary").mkdir()
    return Desk(tmp_path)


@pytest.fixture
def typed(desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], zygote: ZygoteClient):
    """Types a command in this process, with the tests' own zygote: exit status, output, errors."""
    monkeypatch.chdir(desk.folder)
    monkeypatch.setattr("tempfile.tempdir", str(desk.folder / "temporary"))
    monkeypatch.setattr("headway.cli.check.check_parity", partial(run_check, warm=zygote))

    def type_(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headway", "check", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert desk.left_behind() == []
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return type_


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "headway.cli.main", "check", *words]
        environment = os.environ | {"TMPDIR": str(self.folder / "temporary")}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    def type(self, *words: str, status: int = 0) -> tuple[str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=CEILING_S)
        assert process.returncode == status, (process.returncode, out, err)
        assert self.left_behind() == []
        return out, err

    def left_behind(self) -> list[str]:
        names = {path.name for path in self.folder.iterdir()} - {"r.toml", "temporary", "kept"}
        return [*names, *(path.name for path in (self.folder / "temporary").glob("headway-*"))]


@pytest.mark.slow
def test_custom_class_on_a_mesh_is_equal_and_exits_0(desk, dataset: Path, monkeypatch) -> None:
    """The whole way, in processes of its own: a plain module that no line of Headway is in, cut by a layout."""
    elsewhere = desk.folder / "temporary" / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text(MINE)
    (elsewhere / "mine.toml").write_text(RECIPE.format(data=dataset))
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    out, err = desk.type(str(elsewhere / "mine.toml"), "--mesh", "tensor=2", "--steps", "2", "--keep", "kept")
    lines = out.splitlines()
    assert lines[0] == "one process against tensor 2, 2 steps, float32"
    assert [line.split()[0] for line in lines[1:6]] == ["forward", "loss", "gradients", "parameters", "after"]
    assert all("  ok" in line for line in lines[1:6])
    assert lines[6:] == ["equal.", "kept: kept"]
    assert err.splitlines() == ["running one process", "running tensor 2: 2 workers on cpu"]
    marks = json.loads((desk.folder / "kept" / "mesh-1" / "trial" / "marks-1.json").read_text())
    assert [mark["name"] for mark in marks] == ["tokens", "blocks.0", "blocks.1", "norm", "head"]
    assert "\x1b" not in out + err


@pytest.mark.slow
def test_differing_mesh_exits_1_and_recipe_mesh_is_the_default(typed, monkeypatch) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", json.dumps({"mutations": ["whole-norm"]}))
    settings = ["--set", "parallel.tensor=2", "--set", "train.microbatch=4"]
    status, out, _ = typed("r.toml", *settings, "--steps", "1", "--json")
    told = json.loads(out)
    assert status == 1
    assert told["equal"] is False
    (mesh,) = told["meshes"]
    assert (mesh["mesh"], mesh["workers"], mesh["microbatch"]) == ("tensor 2", 2, 4)
    assert mesh["first"]["kind"] == "gradient"
    assert mesh["first"]["name"] == "norm.weight"
    assert mesh["largest"]["forward"]["difference"] < 1e-5
    assert len(told["losses"]) == told["steps"] == 1


def test_ctrl_c_while_torch_is_imported_leaves_nothing(desk) -> None:
    process = desk.start("r.toml", "--mesh", "shard=2")
    assert process.stderr is not None
    assert process.stderr.readline() == "running one process\n"
    children = eventually(lambda: psutil.Process(process.pid).children(recursive=True))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=CEILING_S)
    assert process.returncode == 1, (out, err)
    assert "error: stopped on request after 0 of 1 meshes" in err
    assert psutil.wait_procs(children, timeout=CEILING_S)[1] == []
    assert desk.left_behind() == []


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["r.toml"], 2, "nothing to check: no --mesh, and the recipe has no [parallel]"),
        (["none.toml", "--mesh", "shard=2"], 2, "no such recipe"),
        (["r.toml", "--mesh", "shrad=2"], 2, "expected AXIS=SIZE, got 'shrad=2'"),
        (["r.toml", "--mesh", "shard=2,shard=2"], 2, "shard is given twice"),
        (["r.toml", "--mesh", "replicate=3"], 2, "replicate 3: train.batch is 8 sequences, which 3 workers cannot"),
        (["r.toml", "--mesh", "shard=2", "--mesh", "tensor=3"], 2, "tensor 3: "),
        (["r.toml", "--mesh", "pipeline=2,schedule=gpipe"], 2, "schedule: input should be"),
        (["r.toml", "--mesh", "pipeline=2,stages=1:2:x"], 2, "stages: this is no whole number"),
        (["r.toml", "--mesh", "pipeline=2,stages=1:2"], 2, "pipeline 2, stages 1:2: "),
        (["r.toml", "--mesh", "shard=2,keep_weights=maybe"], 2, "keep_weights: this is neither true nor false"),
        (["r.toml", "--mesh", "shard=2", "--set", "data.path=nowhere"], 2, "nowhere"),
        (["r.toml", "--mesh", "shard=2", "--keep", "r.toml"], 2, "not an empty folder"),
    ],
)
def test_bad_input_is_one_sentence(typed, words: list[str], status: int, message: str) -> None:
    ended, _, err = typed(*words)
    assert ended == status
    assert message in err
    assert err.startswith("error: ")
    assert "running" not in err
    assert "Traceback" not in err


def test_mesh_option_takes_every_key_of_parallel() -> None:
    text = "pipeline=2, shard=3,schedule=interleaved,chunks=3,stages=1:3:1:1:1:1,keep_weights=true"
    wanted = {
        "pipeline": 2, "shard": 3, "schedule": "interleaved", "chunks": 3, "stages": (1, 3, 1, 1, 1, 1),
        "keep_weights": True,
    }  # fmt: skip
    assert parse_layout(text) == Parallel.model_validate(wanted)
    assert parse_layout("tensor=2").shard == 1, "an axis that is left out is 1"
    assert parse_layout("expert=2").shard == 2, "experts are a part of shard"
    assert parse_layout("shard=4,expert=2").shard == 4
    with pytest.raises(UsageError, match="chunks given twice"):
        parse_layout("pipeline=2,chunks=2,chunks=2")


# -- what is printed


def verdict(**differences: float) -> Verdict:
    largest = {
        kind: Finding(kind, "" if kind == "loss" else "layers.3.mlp.down.weight", 2, differences.get(kind, 1e-9), limit)
        for kind, limit in ((kind, FLOAT32.of(kind)) for kind in KINDS)
    }
    return Verdict(largest, next((finding for finding in largest.values() if finding.differs), None))


def checked(*meshes: MeshParity) -> ParityReport:
    return ParityReport("tiny", 3, "float32", "cpu", FLOAT32, [5.0, 4.0, 3.0], meshes)


def compared(name: str, found: Verdict | None, error: str | None = None, hint: str | None = None) -> MeshParity:
    return MeshParity(name, Parallel(shard=2), 2, 4, 1.5, found, error, hint)


def test_one_mesh_is_shown_in_lines() -> None:
    lines = check_lines(checked(compared("shard 2 x tensor 2", verdict(gradient=2.5e-6))))
    assert lines == [
        "one process against shard 2 x tensor 2, 3 steps, float32",
        "  forward       1.0e-09 of 1e-5   ok       largest: layers.3.mlp.down.weight",
        "  loss          1.0e-09 of 1e-5   ok",
        "  gradients     2.5e-06 of 1e-4   ok       largest: layers.3.mlp.down.weight",
        "  parameters    1.0e-09 of 1e-4   ok       largest: layers.3.mlp.down.weight",
        "  after AdamW   1.0e-09 of 1e-4   ok       largest: layers.3.mlp.down.weight",
        "equal.",
    ]


def test_first_difference_is_named() -> None:
    lines = check_lines(checked(compared("tensor 2", verdict(gradient=0.5, parameter=float("inf")))))
    assert "  gradients     5.0e-01 of 1e-4   DIFFERS  largest: layers.3.mlp.down.weight" in lines
    assert lines[-2:] == [
        "  first difference: gradient of layers.3.mlp.down.weight, step 2: off by 5.0e-01, 1e-04 allowed",
        "not equal.",
    ]


def test_several_meshes_are_a_table_with_details_of_differences() -> None:
    failed = compared("pipeline 2", None, "worker 1 failed: out of memory", "lower train.microbatch")
    lines = check_lines(checked(compared("shard 2", verdict()), compared("tensor 2", verdict(loss=0.25)), failed))
    assert lines == [
        "one process against 3 meshes, 3 steps, float32",
        "  mesh              loss   gradients  parameters",
        "  (allowed)         1e-5        1e-4        1e-4",
        "  shard 2        1.0e-09     1.0e-09     1.0e-09  ok",
        "  tensor 2       2.5e-01     1.0e-09     1.0e-09  DIFFERS",
        "  pipeline 2  failed",
        "",
        "tensor 2",
        "  forward       1.0e-09 of 1e-5   ok       largest: layers.3.mlp.down.weight",
        "  loss          2.5e-01 of 1e-5   DIFFERS",
        "  gradients     1.0e-09 of 1e-4   ok       largest: layers.3.mlp.down.weight",
        "  parameters    1.0e-09 of 1e-4   ok       largest: layers.3.mlp.down.weight",
        "  after AdamW   1.0e-09 of 1e-4   ok       largest: layers.3.mlp.down.weight",
        "  first difference: the loss, step 2: off by 2.5e-01, 1e-05 allowed",
        "",
        "pipeline 2",
        "  failed: worker 1 failed: out of memory",
        "  hint:   lower train.microbatch",
        "",
        "1 of 3 equal, 1 failed.",
    ]


def test_long_names_get_a_separate_line() -> None:
    name = "model.decoder.layers.11.self_attention.output_projection.weight"
    found = verdict()
    wide = {
        kind: Finding(kind, name, 1, finding.difference, finding.tolerance) for kind, finding in found.largest.items()
    }
    text = "\n".join(check_lines(checked(compared("shard 2", Verdict(wide, None)))))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert f"\n      largest: {name}\n" in text


def test_wide_meshes_have_two_lines_in_a_table() -> None:
    wide = "replicate 2 x tensor 2 x pipeline 2, interleaved"
    lines = check_lines(checked(compared("shard 2", verdict()), compared(wide, verdict(loss=2e-6))))
    assert max(len(line) for line in lines) <= 80
    at = lines.index(f"  {wide}")
    assert lines[at + 1].split() == ["2.0e-06", "1.0e-09", "1.0e-09", "ok"]
    assert lines[-1] == "equal."


def test_json_has_everything() -> None:
    told = as_json(checked(compared("shard 2", verdict(adamw=1.0)), compared("pipeline 2", None, "it failed")))
    again = json.loads(json.dumps(told))
    assert again["tolerances"]["adamw"] == 1e-4
    assert again["meshes"][0]["first"] == {
        "kind": "adamw", "name": "layers.3.mlp.down.weight", "step": 2, "difference": 1.0, "tolerance": 1e-4,
        "note": "",
    }  # fmt: skip
    assert again["meshes"][0]["parallel"]["shard"] == 2
    assert again["meshes"][1]["first"] is again["meshes"][1]["largest"] is None
    assert again["meshes"][1]["error"] == "it failed"
    assert again["equal"] is False
