"""The documentation is true: the reference is what the code says, links lead somewhere, commands exist."""

import importlib.util
import re
import shlex
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from headway.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import outputs  # noqa: E402

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
VERB = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*headway (.*)$")
# What a user types around a command in a shell, and no part of it.
SHELL = re.compile(r"\s(?:\||>|2>|&&|;|#).*$")


@cache
def reference() -> dict[str, str]:
    """The pages of the reference, made anew."""
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages: dict[str, str] = module.pages()
    return pages


@cache
def program() -> Any:
    return typer.main.get_command(app)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(text: str) -> list[list[str]]:
    """Every `headway ...` that stands at the beginning of a line in a code block, without shell around it."""
    found = []
    for _, block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if match := VERB.match(line):
                found.append(shlex.split(SHELL.sub("", " " + match[1])))
    return found


def check(words: list[str]) -> None:
    """Parse a command as the program would, without running it; Typer raises for what does not exist."""
    command = program()
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no verb {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    if words or not hasattr(command, "commands"):
        command.make_context("headway", list(words))


def test_the_reference_is_what_the_code_says_now() -> None:
    for name, text in reference().items():
        committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert committed == text, f"docs/reference/{name} is stale: python docs/generate.py"


def test_the_reference_names_every_verb_and_key() -> None:
    pages = reference()
    for verb in ("train", "resume", "checkpoint export", "data build", "recipe show"):
        assert f"## headway {verb}\n" in pages["cli.md"]
    for key in ("seed", "model.kv_heads", "data.holdout", "train.lr", "eval.windows", "checkpoint.keep_last"):
        assert f"- `{key}` (" in pages["recipe.md"]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "reference"], ids=page_id)
def test_commands_exist(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        try:
            check(words)
        except (Exception, SystemExit) as error:
            pytest.fail(f"headway {shlex.join(words)}: {error!r}")


@pytest.mark.parametrize(
    "line", ["headway trian x.toml", "$ headway report a --jsn", "headway stop", "headway data build --vocab-size"]
)
def test_a_wrong_command_is_found(line: str) -> None:
    (words,) = commands(f"```\n{line}\n```\n")
    with pytest.raises(Exception, match=r"trian|jsn|run|vocab-size"):
        check(words)


def test_commands_are_found_in_code_blocks_only() -> None:
    text = "headway no\n```\n$ headway runs | head -3\nA=1 headway stop last  # now\nnext: headway no\n```\n"
    assert commands(text) == [["runs"], ["stop", "last"]]
    assert sum(len(commands(page.read_text(encoding="utf-8"))) for page in PAGES) > 30


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_pages_are_narrow_and_speak_of_no_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"/(?:tmp|work|home|root)/", text)
    if page.is_relative_to(ROOT / "docs") and page.parent.name in ("guides", "concepts", "reference"):
        assert [line for line in text.splitlines() if len(line) > 110] == []


QUOTATIONS = [quotation for page in outputs.pages() for quotation in outputs.quotations(page)]


@pytest.mark.parametrize(
    "quotation",
    [
        pytest.param(quotation, marks=pytest.mark.slow if quotation.command.startswith(outputs.SLOW) else ())
        for quotation in QUOTATIONS
        if quotation.is_exact
    ],
    ids=lambda quotation: quotation.name,
)
def test_quoted_output_is_what_the_command_prints(quotation: outputs.Quotation) -> None:
    difference = outputs.first_difference(quotation.output, outputs.run(quotation.command))
    assert difference is None, f"{quotation.name}: {difference!r} (python docs/generate.py --outputs)"


def test_every_other_quoted_phrase_is_in_a_string_of_the_code() -> None:
    """Output of long runs, engines and GPUs: its numbers are of that run, its words of today's code."""
    others = [quotation for quotation in QUOTATIONS if not quotation.is_exact]
    assert len(others) > 100
    unknown = {quotation.name: phrases for quotation in others if (phrases := outputs.unknown_phrases(quotation))}
    assert not unknown


def test_every_fence_with_a_command_is_read() -> None:
    """Commands by themselves have no output to compare; all that follow a `$` and print something are found."""
    for page in outputs.pages():
        dollars = {
            line.removeprefix("$ ").removesuffix("\\").split(" #")[0].strip()
            for _, block in FENCE.findall(page.read_text(encoding="utf-8"))
            for line, after in zip(block.splitlines(), [*block.splitlines()[1:], ""], strict=True)
            if line.startswith("$ headway") and after and not after.startswith(("$", "headway "))
        }
        read = " ".join(quotation.command for quotation in outputs.quotations(page))
        assert not {command for command in dollars if command not in read}, page


def test_stale_quotations_are_detected() -> None:
    quotation = next(quotation for quotation in QUOTATIONS if quotation.command.startswith("kill -9"))
    assert any("resuming from step" in line for line in quotation.output)
    renamed = tuple(line.replace("resuming from", "it goes on at") for line in quotation.output)
    assert outputs.unknown_phrases(replace(quotation, output=renamed))
    printed = ["a 1", "b 2", "c 3"]
    assert outputs.first_difference(printed, printed) is None
    assert outputs.first_difference(["a 1", "...", "c 3"], printed) is None
    assert outputs.first_difference(["...", "b 2", "..."], printed) is None
    assert outputs.first_difference(["a 1", "c 3"], printed) == "c 3"
    assert outputs.first_difference(["a 1", "b 2"], printed) == "c 3"
    assert outputs.first_difference(["...", "b 3", "..."], printed) == "b 3"
