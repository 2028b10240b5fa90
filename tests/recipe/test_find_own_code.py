"""A class that a recipe names is looked for before a process starts, and not imported."""

from pathlib import Path

import pytest

from headway.errors import RecipeError
from headway.recipe.find_own_code import check_class


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(
        "raise SystemExit('imported')\nclass Loss:\n    pass\n"
        "async def co(answer):\n    return 1.0\n@made_plain\nasync def plain(answer):\n    return 1.0\n"
    )
    (tmp_path / "wrong.py").write_text("class Loss(\n\n")
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "__init__.py").write_text("from several.inner import Other\n")
    (tmp_path / "several" / "inner.py").write_text("Other = type('Other', (), {})\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "local.py").write_text("class Loss: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize("name", ["mine:Loss", "mine:plain", "several:Other", "several.inner:Other"])
def test_a_class_that_is_there_is_accepted(folder: Path, name: str) -> None:
    check_class(name, "objective.class")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("mine:Los", "mine.py has no Los", "did you mean Loss"),
        ("mine:co", "co of .*mine.py is async", "a reward is a plain function"),
        ("mine.inner:Loss", "mine.py is no package", "for example mine:Loss"),
        ("several.outer:Other", "there is no .*several/outer.py", "check the name of the module"),
        ("wrong:Loss", "wrong.py:1 is no Python", "was never closed"),
        ("local:Loss", "there is no module local", "local.py is in this folder: put PYTHONPATH=. before the command"),
        ("nowhere:Loss", "there is no module nowhere", "install the package that has nowhere"),
    ],
)
def test_one_that_is_not_is_named_with_what_to_do(folder: Path, name: str, message: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=rf"objective.class = '{name}': .*{message}") as caught:
        check_class(name, "objective.class")
    assert hint in (caught.value.hint or "")
