"""Shell completion in real shells, with the scripts that `headway completion` prints."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.errors import UsageError


@dataclass(frozen=True)
class Shell:
    """How to start a shell without anybody's settings, load the script of Headway into it, and ask for completions."""

    flags: tuple[str, ...]
    load: str
    ask: str


KINDS = {
    "bash": Shell(
        ("--norc",),
        'eval "$(headway completion bash)"; complete -p headway > /dev/null || exit 1',
        "COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); _headway_completion headway\n"
        "printf '%s\\n' \"${{COMPREPLY[@]}}\"",
    ),
    # Zsh completes only in a terminal: one on a pseudo-terminal of its own, which prints what it was offered.
    "zsh": Shell(
        ("-f",),
        'autoload -Uz compinit && compinit -u -D; eval "$(headway completion zsh)"\n'
        "_arguments() { print -rl -- $@ }\n_files() { print files }",
        "words=({words}); CURRENT=$#words; _headway_completion",
    ),
    "fish": Shell(("--no-config",), "headway completion fish | source", 'complete --do-complete "{line}"'),
}
NEXT = "-- next --"
SHELLS = ["bash", *(pytest.param(shell, marks=pytest.mark.slow) for shell in ("zsh", "fish"))]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where `headway` is this checkout, and ./runs has two runs."""
    program = tmp_path / "bin" / "headway"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom headway.cli.main import main\nmain()\n")
    program.chmod(0o755)
    for name in ("first-0001", "second-0002"):
        (tmp_path / "runs" / name / "events").mkdir(parents=True)
    (tmp_path / "runs" / "not-a-run").mkdir()
    path = f"{program.parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path), "HEADWAY_RUNS": ""}


def offered(shell: str, typed: list[list[str]], environment: dict[str, str]) -> list[list[str]]:
    """What one process of a shell offers for the last word of each of these lines."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}: apt-get install {shell}")
    kind = KINDS[shell]
    script = [kind.load]
    for words in typed:
        quoted = " ".join(f"'{word}'" for word in words)
        script += [kind.ask.format(words=quoted, line=" ".join(words)), f"echo '{NEXT}'"]
    done = subprocess.run(
        [shell, *kind.flags, "-c", "\n".join(script)],
        env=environment,
        cwd=environment["HOME"],
        capture_output=True,
        text=True,
        check=True,
    )
    answers = done.stdout.split(f"{NEXT}\n")
    assert (len(answers), answers.pop()) == (len(typed) + 1, "")
    return [_choices(shell, answer) for answer in answers]


def _choices(shell: str, answer: str) -> list[str]:
    lines = [line.strip() for line in answer.splitlines()]
    if shell == "fish":
        return [line.partition("\t")[0] for line in lines]
    if shell == "zsh":
        return re.findall(r'"([^"]*)"(?::"[^"]*")?', answer)
    return lines


COMPLETED: list[tuple[list[str], set[str], set[str]]] = [
    (["headway", "re"], {"report", "resume", "recipe", "replay", "requeue"}, {"train", "runs"}),
    (["headway", "checkpoint", "ex"], {"export"}, {"import", "ls"}),
    (["headway", "train", "--wo"], {"--workers"}, {"--json"}),
    (["headway", "data", "build", "--tok"], {"--tokenizer", "--tokenizer-engine"}, {"--force"}),
    (["headway", "report", "fi"], {"first-0001"}, {"second-0002"}),
    (["headway", "logs", "--runs", "runs", "second-0001", "--att"], {"--attempt"}, {"--rank"}),
    (["headway", "checkpoint", "verify", "--runs", "runs", ""], {"first-0001", "second-0002"}, {"not-a-run"}),
]
"""What is typed, and what must be offered and must not."""


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete(shell: str, environment: dict[str, str]) -> None:
    answers = offered(shell, [words for words, _, _ in COMPLETED], environment)
    for (words, among, missing), answer in zip(COMPLETED, answers, strict=True):
        assert among <= set(answer), words
        assert not missing & set(answer), words
    if shell == "bash":
        assert answers[-1] == ["first-0001", "second-0002"], "all runs of another folder, and nothing else"


def test_other_shells_are_a_usage_error() -> None:
    assert isinstance(CliRunner().invoke(app, ["completion", "csh"]).exception, UsageError)


def test_script_is_the_same_in_json() -> None:
    plain, document = (CliRunner().invoke(app, ["completion", "bash", *words]) for words in ([], ["--json"]))
    assert json.loads(document.stdout) == {"shell": "bash", "script": plain.stdout.removesuffix("\n")}
