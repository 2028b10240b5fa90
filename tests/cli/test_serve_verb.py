"""What `headway serve` and its kin print when they end, and when the command is wrong."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.cli.model_process import adapters_of, model_process
from headway.cli.serve import ending_line, start_lines
from headway.errors import UsageError, WorkerError


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ({"draining": 0}, "stopping"),
        ({"draining": 1}, "draining 1 request: new ones are refused"),
        ({"draining": 12}, "draining 12 requests: new ones are refused"),
        ({"stopped": True, "unfinished": 0}, "stopped"),
        ({"stopped": True, "unfinished": 2}, "stopped; 2 requests did not finish"),
    ],
)
def test_the_end_is_said_in_one_line(message: dict[str, int], line: str) -> None:
    assert ending_line(message) == line


def test_the_start_fits_80_columns() -> None:
    lines = start_lines({
        "listening": "http://127.0.0.1:18000/v1", "model": "demo-18443@200", "parameters": 1_042_000,
        "dtype": "float32", "device": "cpu", "cached": True, "cache_tokens": 32_768, "chat": False,
        "adapters": ["docs", "newest"],
    })  # fmt: skip
    assert lines[0] == "demo-18443@200  1.0M parameters, float32 on cpu, KV cache of 32,768 tokens"
    assert lines[1:3] == ["adapters: docs, newest", "no chat template: completions only"]
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["generate", "last"], "missing argument 'IN.jsonl'", "headway generate --help"),
        (["serve", "last", "--prot", "1"], "no such option: --prot", "headway serve --help"),
        (["serve", "last", "--port", "x"], "invalid value for '--port'", "headway serve --help"),
        (["model", "show"], "missing argument", "headway model show --help"),
        (["nonsense"], "no such command 'nonsense'", "headway --help"),
        (["generate", "last", __file__], "--out is needed", f"headway generate last {__file__} --out answers.jsonl"),
        (
            ["serve", "recipes/demo.toml"],
            "recipes/demo.toml is a recipe, not a model",
            "headway train recipes/demo.toml",
        ),
        (
            ["sample", "recipes/demo.toml"],
            "recipes/demo.toml is a recipe, not a model",
            "headway train recipes/demo.toml",
        ),
        (["sample", "."], ". has no config.json", "Hugging Face folder or a run"),
    ],
)
def test_mistakes_in_a_command_are_a_sentence_and_a_hint(words: list[str], message: str, hint: str) -> None:
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, UsageError), error
    assert message in error.message
    assert hint in (error.hint or "")


@pytest.mark.parametrize(("asked", "error"), [(True, KeyboardInterrupt), (False, WorkerError)])
def test_a_process_that_is_told_to_end_while_it_starts_was_interrupted(
    tmp_path: Path, asked: bool, error: type[BaseException]
) -> None:
    """One that another process ends has failed."""
    (tmp_path / "loading.py").write_text("import signal\nprint('{}', flush=True)\nsignal.pause()\n")

    def run() -> None:
        with model_process("loading", "server", {}, cwd=tmp_path) as running:
            next(running.messages())
            (running.end if asked else running.process.terminate)()

    with pytest.raises(error):
        run()


def test_an_adapter_that_is_not_there_is_named_with_its_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--lora x=nope: "):
        adapters_of(["x=nope"], "base", tmp_path)
