"""What every verb exits with on wrong input: 2 where the command or the recipe must change, 1 where it failed.

All in this process, and nothing is started: each row is refused before.
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.agent.launch.resolve import resolve_recipe
from headway.cli.main import main
from headway.data import BuildOptions, build_dataset
from headway.recipe import to_toml
from headway.track import Recorder, create_run, record_path, set_aside, write_json

USAGE = [
    "train",
    "train r.toml none.toml",
    "train none.toml",
    "train folder",
    "train text.txt",
    "train r.toml --set train.stepz=5",
    "train r.toml --set train.steps",
    "train r.toml --set train.steps=many",
    "train r.toml --set data.path=nowhere",
    "train r.toml --set data.path=folder",
    "train r.toml --set data.path=r.toml",
    "train r.toml --set data.path=",
    "train r.toml --set data.version=0123456789abcdef",
    "train r.toml --set data.seq=100000000",
    "train r.toml --set data.holdout=2",
    "train r.toml --set train.device=cuda",
    "train r.toml --set model.init=nowhere",
    "train r.toml --set model.init=folder",
    "train r.toml --set model.init=done@7",
    "train r.toml --set model.family=none",
    "train r.toml --set checkpoint.store.url=ftp://x",
    "train r.toml --name done",
    "train r.toml --name ../x",
    "train r.toml --name last",
    "train r.toml --workers 0",
    "train r.toml --workers 3",
    "train r.toml --nodes 4 --workers 2",
    "train r.toml --mesh tensor=3",
    "train r.toml --from nowhere",
    "train r.toml --from done",
    "train r.toml --from done@3",
    "train r.toml --from done@x",
    "train --from done",
    "resume nowhere",
    "resume done --set train.lr=1",
    "resume done --set data.path=nowhere",
    "resume done --set nothing=1",
    "resume done --mesh tensor=3",
    "stop nowhere",
    "sample nowhere",
    "sample done",
    "sample done@3",
    "eval",
    "eval done",
    "eval done --tasks gsm8",
    "eval done --tasks gsm8k",
    "eval done --tasks none.jsonl",
    "eval done --tasks none.toml",
    "eval done --tasks r.toml",
    "eval done --tasks text.txt",
    "eval nowhere --tasks text.txt",
    "eval folder --tasks text.txt,text.txt",
    "eval --compare done nowhere",
    "eval --compare done folder",
    "eval --compare none.jsonl done",
    "eval done --compare done done",
    "report nowhere",
    "report",
    "metrics nowhere",
    "metrics done --key none",
    "logs nowhere",
    "logs done --rank 7",
    "logs done --attempt 9",
    "logs .failed/nowhere",
    "stacks nowhere",
    "diff done nowhere",
    "diff done",
    "fetch nowhere",
    "checkpoint ls nowhere",
    "checkpoint verify nowhere",
    "checkpoint verify done@3",
    "checkpoint show done",
    "checkpoint show folder/none",
    "checkpoint diff done done",
    "checkpoint export done out",
    "checkpoint import folder",
    "checkpoint import nowhere",
    "recipe show none.toml",
    "recipe show r.toml --set train.stepz=5",
    "data build out none.txt",
    "data build out folder",
    "data build out text.txt --vocab-size 3",
    "data build out text.txt --tokenizer none",
    "data build out text.txt --tokenizer text.txt",
    "data build out text.txt --shard-tokens 0",
    "data build out text.txt --exclude *.txt",
    "data build out text.txt --engine nowhere",
    "data build r.toml text.txt",
    "data build folder text.txt",
    "data build other text.txt",
    "data show nowhere",
    "data show folder",
    "data verify nowhere",
    "data mix none.toml",
    "model show nowhere",
    "model show none.toml",
    "model show folder",
    "model diff nowhere nowhere",
    "hardware show nothing",
    "plan none.toml",
    "plan r.toml --on nothing",
    "plan r.toml --on h100x8x1 --mesh tensor=3",
    "plan r.toml --cluster none.toml",
    "plan r.toml --set train.stepz=5",
    "submit none.toml",
    "submit r.toml --engine nothing",
    "submit r.toml --on nothing",
    "submit r.toml --name done",
    "sweep none.toml --grid train.lr=1",
    "sweep r.toml --grid train.lr",
    "sweep r.toml --grid train.rate=1,2",
    "sweep nowhere",
    "jobs --engine nothing",
    "cancel nowhere",
    "cancel done",
    "requeue nowhere",
    "requeue done",
    "nodes --engine nothing",
    "agent --run nowhere",
    "simulate none.csv --on a100x8x2",
    "simulate text.txt --on a100x8x2",
    "simulate jobs.csv --on nothing",
    "simulate jobs.csv --on a100x8x2 --policy none",
    "trace import none out.csv",
    "replay nowhere",
    "why job --from nowhere",
    "check none.toml",
    "check r.toml --mesh tensor=3",
    "chaos none.toml",
    "doctor --storage nowhere",
    "doctor --engine nothing",
    "kernels --device nothing",
    "completion tcsh",
    "nothing",
    "--nothing",
]
FAILED = [
    "stop done",  # understood; the run is just not running
    "stacks done",
    "data verify damaged",
    "train r.toml --set data.path=damaged",
    "diff done other",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, recipe, dataset: Path) -> Path:
    """A folder with a recipe, a run without checkpoints, two datasets, one of them damaged, and files of no use."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "r.toml").write_text(to_toml(recipe({"name": "tiny"})))
    (folder / "text.txt").write_text("a few words, and not much else. " * 40)
    (folder / "other.txt").write_text("other words " * 40)
    (folder / "jobs.csv").write_text("id,submit_s,gpus,run_s\na,0,1,10\n")
    (folder / "folder").mkdir()
    (folder / "folder" / "file").write_text("")
    for name in ("other", "damaged"):
        build_dataset(folder / name, [folder / "other.txt"], BuildOptions(vocab_size=280))
    shard = next((folder / "damaged").glob("*tokens*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff\xff")
    for name in ("done", "other", "aside"):
        run = create_run(folder / "runs", "tiny", name)
        write_json(run.recipe_file, resolve_recipe(recipe(), folder / "runs").model_dump())
        with Recorder(record_path(run.events, 1, "agent"), attempt=1, process="agent") as recorder:
            recorder.event("attempt", workers=1, device="cpu", from_step=0, recipe_changes={})
            recorder.event("end", outcome="failed", reason="because")
    set_aside(run)
    return folder


def say(folder: Path, command: str) -> SimpleNamespace:
    """A command as typed, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["headway", *command.split()])
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.delenv("HEADWAY_RUNS", raising=False)
        with pytest.raises(SystemExit) as ended:
            main()
    return SimpleNamespace(status=ended.value.code or 0, out=out.getvalue(), err=err.getvalue())


def contents(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "queue" not in path.parts}


@pytest.mark.parametrize(
    ("command", "status"), [*((command, 2) for command in USAGE), *((command, 1) for command in FAILED)]
)
def test_exit_status_tells_a_mistake_from_a_failure(place: Path, command: str, status: int) -> None:
    before = contents(place)
    answer = say(place, command)
    assert answer.status == status, answer.err
    assert "Traceback" not in answer.err
    assert status == 1 or "rror: " in answer.err or "Usage: " in answer.err
    assert contents(place) == before, "what is refused leaves nothing behind"


def test_refusals_are_json_too(place: Path) -> None:
    answer = say(place, "train r.toml --name done --json")
    assert (answer.status, json.loads(answer.out)["error"]) == (2, "run done already exists")


def test_failed_runs_are_read_by_name(place: Path) -> None:
    assert say(place, "report aside").out.startswith("aside  failed, step 0")
    assert say(place, "runs").out.count("aside") == 0
