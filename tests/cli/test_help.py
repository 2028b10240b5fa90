"""Help, usage errors and signatures of every verb, without running any."""

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from headway.cli.main import VERBS, app
from headway.errors import UsageError

PROGRAM: Any = typer.main.get_command(app)
NAMES = [verb for verbs in VERBS.values() for verb in verbs]
COMMANDS = {(verb,): PROGRAM.commands[verb] for verb in NAMES}
COMMANDS |= {
    (verb, name): command
    for (verb,), group in [*COMMANDS.items()]
    for name, command in getattr(group, "commands", {}).items()
}


def help_of(*words: str, program: typer.Typer = app) -> list[str]:
    result = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(
        app, [*words, "--help"], prog_name="headway"
    )
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_help_lists_the_verbs_in_groups() -> None:
    lines = help_of()
    assert [line.rstrip(":") for line in lines if line.rstrip(":") in VERBS] == list(VERBS)
    for verbs in VERBS.values():
        for verb, text in verbs.items():
            assert f"  {verb:{max(map(len, NAMES))}}  {text}" in lines
            assert len(text) <= 60


def test_help_of_the_program_imports_no_verb() -> None:
    check = (
        "import sys; from headway.cli.main import app; app(['--help'], standalone_mode=False); "
        "assert not {'pydantic', 'rich', 'headway.track', 'headway.recipe', 'headway.cli.train'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], env=os.environ | {"PYTHONPATH": ":".join(sys.path)}, check=True)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_is_complete_in_80_columns(words: tuple[str, ...]) -> None:
    lines = help_of(*words)
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines[1:] if line.endswith("...")], "a line of help is cut off"
    assert "".join(lines).count("Show this message and exit.") == 1
    for parameter in COMMANDS[words].params:
        assert parameter.help, f"{parameter.name} has no help"
        assert parameter.help in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_signatures_without_imports_are_those_of_the_module(words: tuple[str, ...]) -> None:
    name = words[0].replace("-", "_")
    module = importlib.import_module(f"headway.cli.{name}")
    program = typer.Typer(add_completion=False, rich_markup_mode=None)
    program.command("other")(lambda: None)
    if hasattr(module, "app"):
        program.add_typer(module.app, name=words[0])
    else:
        program.command(words[0])(getattr(module, name))
    assert help_of(*words, program=program) == help_of(*words)


def test_unknown_verbs_and_options_are_usage_errors() -> None:
    verb = CliRunner().invoke(app, ["trian"]).exception
    option = CliRunner().invoke(app, ["train", "--wrokers", "2"]).exception
    assert isinstance(verb, UsageError)
    assert isinstance(option, UsageError)
    assert "'train'" in verb.message
    assert "--workers" in option.message
