"""The recipes that come with Headway are listed and copied, and what to type next exists."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from headway.cli.main import app
from headway.errors import UsageError
from headway.recipe import load_recipe
from headway.recipe.shipped import shipped_file, shipped_files

FILES = Path(__file__).resolve().parents[2] / "recipes"
NAMES = [str(path.relative_to(FILES).with_suffix("")) for path in sorted(FILES.rglob("*.toml"))]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["recipe", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_file_is_listed_with_a_sentence() -> None:
    listed = json.loads(run("ls", "--json"))
    assert sorted(file["name"] for file in listed) == sorted(NAMES)
    text = " ".join(run("ls").split())
    for file in listed:
        assert 20 < len(file["summary"]) < 200
        assert f"{file['name']} {file['summary']}" in text


@pytest.mark.parametrize("name", NAMES)
def test_copy_says_the_same_as_the_original_and_names_commands_that_exist(name: str) -> None:
    copied = json.loads(run("cp", name, "deep/folder", "--json"))
    copy = Path(copied["files"][0])
    assert copy.parent == Path("deep/folder")
    if "/" in name:
        assert tomllib.loads(copy.read_text()) == tomllib.loads((FILES / f"{name}.toml").read_text())
    elif name != "continue":  # its model is the one to continue
        assert load_recipe(copy) == load_recipe(FILES / f"{name}.toml")
    assert copied["next"]
    for command in copied["next"]:
        program, verb, *words = shlex.split(command)
        if program == "python":
            assert (FILES.parent / verb).is_file()
            continue
        parser = typer.main.get_command(app).commands[verb]
        while hasattr(parser, "commands"):
            parser, words = parser.commands[words[0]], words[1:]
        parser.make_context(program, words)
        assert "recipes/" not in command


def test_scripts_that_only_the_repository_has_are_noted(folder: Path) -> None:
    said = CliRunner().invoke(app, ["recipe", "cp", "sft"], catch_exceptions=False)
    assert "python examples/make_chats.py data/questions\n" in said.stdout
    assert "note: examples/make_chats.py is a file of Headway's repository" in said.stderr
    (folder / "examples").symlink_to(FILES.parent / "examples")
    assert "note: " not in CliRunner().invoke(app, ["recipe", "cp", "sft"], catch_exceptions=False).stderr


def test_data_is_built_only_where_there_is_none() -> None:
    build, train = shipped_file("demo").commands(Path("demo.toml"))
    assert build.startswith("headway data build data/python-stdlib ")
    assert train == "headway train demo.toml"
    Path("data/python-stdlib").mkdir(parents=True)
    assert shipped_file("demo").commands(Path("demo.toml")) == [train]


def test_extended_recipes_are_copied_too() -> None:
    assert run("cp", "qwen3-0.6b-cpu", "mine.toml").splitlines()[:2] == ["mine.toml", "qwen3-0.6b.toml"]
    assert load_recipe(Path("mine.toml")).name == "qwen3-0.6b-cpu"


def test_changed_file_is_not_replaced() -> None:
    run("cp", "demo")
    run("cp", "demo")  # the same again: nothing is lost
    Path("demo.toml").write_text('name = "mine"\n')
    with pytest.raises(UsageError, match=r"demo\.toml exists and differs"):
        run("cp", "demo")
    assert Path("demo.toml").read_text() == 'name = "mine"\n'
    with pytest.raises(UsageError, match="is not a folder"):
        run("cp", "check", "demo.toml/deeper.toml")


@pytest.mark.parametrize("name", ["demo", "demo.toml", "recipes/demo.toml"])
def test_name_may_be_a_path(name: str) -> None:
    assert shipped_file(name).path.read_bytes() == (FILES / "demo.toml").read_bytes()


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no recipe named 'dmeo'") as caught:
        shipped_file("dmeo")
    assert "did you mean demo" in str(caught.value.hint)
    assert caught.value.exit_status == 2
    assert len(shipped_files()) == len(NAMES)
