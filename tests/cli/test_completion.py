"""Shell completion in real shells, with the scripts that `headway completion` prints."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.errors import UsageError

BASH = """
eval "$(headway completion bash)"
complete -p headway > /dev/null || exit 1
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_headway_completion headway
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
FISH = """
headway completion fish | source
complete --do-complete "{line}"
"""
# Zsh completes only in a terminal: one on a pseudo-terminal of its own, which prints what it was offered.
ZSH = """
autoload -Uz compinit && compinit -u -D
eval "$(headway completion zsh)"
_arguments() {{ print -rl -- $@ }}
_files() {{ print files }}
words=({words}); CURRENT=$#words
_headway_completion
"""
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


def offered(shell: str, words: list[str], environment: dict[str, str]) -> list[str]:
    """What a shell offers for the last of the words."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}: apt-get install {shell}")
    quoted = " ".join(f"'{word}'" for word in words)
    script = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell].format(words=quoted, line=" ".join(words))
    flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [shell, *flags, "-c", script],
        env=environment,
        cwd=environment["HOME"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.strip() for line in done.stdout.splitlines()]
    if shell == "fish":
        return [line.partition("\t")[0] for line in lines]
    if shell == "zsh":
        return re.findall(r'"([^"]*)"(?::"[^"]*")?', done.stdout)
    return lines


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("words", "among", "missing"),
    [
        (["headway", "re"], {"report", "resume", "recipe", "replay", "requeue"}, {"train", "runs"}),
        (["headway", "checkpoint", "ex"], {"export"}, {"import", "ls"}),
        (["headway", "train", "--wo"], {"--workers"}, {"--json"}),
        (["headway", "data", "build", "--tok"], {"--tokenizer", "--tokenizer-engine"}, {"--force"}),
        (["headway", "report", "fi"], {"first-0001"}, {"second-0002"}),
        (["headway", "logs", "--runs", "runs", "second-0001", "--att"], {"--attempt"}, {"--rank"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_shells_complete(shell: str, words: list[str], among: set[str], missing: set[str], environment) -> None:
    found = set(offered(shell, words, environment))
    assert among <= found
    assert not missing & found


def test_bash_offers_all_runs_of_another_folder(environment: dict[str, str]) -> None:
    words = ["headway", "checkpoint", "verify", "--runs", "runs", ""]
    assert offered("bash", words, environment) == ["first-0001", "second-0002"]


def test_other_shells_are_a_usage_error() -> None:
    assert isinstance(CliRunner().invoke(app, ["completion", "csh"]).exception, UsageError)


def test_script_is_the_same_in_json() -> None:
    plain, document = (CliRunner().invoke(app, ["completion", "bash", *words]) for words in ([], ["--json"]))
    assert json.loads(document.stdout) == {"shell": "bash", "script": plain.stdout.removesuffix("\n")}
