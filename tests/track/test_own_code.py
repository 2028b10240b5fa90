"""Copies of the code that a recipe names tell two versions of one file apart."""

import hashlib
from pathlib import Path

import pytest

from headway.track import RunFolder
from headway.track.differences import RunConditions, find_causes
from headway.track.own_code import code_digests, code_file, record_code


def test_files_that_a_recipe_names_are_copied_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib" / "ownpack").mkdir(parents=True)
    model, reward = tmp_path / "lib" / "own_model.py", tmp_path / "lib" / "ownpack" / "rewards.py"
    model.write_text("raise SystemExit('imported')\n")
    reward.write_text("def reward(): ...\n")
    (tmp_path / "lib" / "ownpack" / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    rewards = [{"name": "ownpack.rewards:reward"}]
    recipe = {"model": {"class": "own_model:Net", "init": "C:\\x"}, "rl": {"rewards": rewards},
              "name": "missing_module:Thing", "data": {"path": "a/b:c"}}  # fmt: skip
    runs = [RunFolder(tmp_path / "runs" / name) for name in "ab"]
    for run in runs:
        run.path.mkdir(parents=True)
        record_code(run, recipe)
        reward.write_text("def reward(): return 2\n")
    first, second = map(code_digests, runs)
    assert first == {
        "own_model": hashlib.sha256(model.read_bytes()).hexdigest()[:12],
        "ownpack.rewards": hashlib.sha256(b"def reward(): ...\n").hexdigest()[:12],
    }
    assert code_file(runs[0], "ownpack.rewards").read_text() == "def reward(): ...\n"
    (cause,) = find_causes(*(RunConditions(None, {}, (1,), digests) for digests in (first, second)))
    assert (cause.kind, cause.key) == ("code", "ownpack.rewards")
    assert find_causes(RunConditions(None, {}, (1,), first), RunConditions(None, {}, (1,), {})) == []
    assert [path.name for path in runs[0].path.iterdir()] == ["code"]
