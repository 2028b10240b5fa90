"""Command output quoted in README.md and docs/: which can be printed anew, and what the code can print at all.

A quotation is a command after `$` in a code block, and the lines up to the next one; `...` stands for lines left out.
Commands that take seconds and depend on nothing but the repository are exact: `python docs/generate.py` writes what
they print, and a test compares. All others were copied from runs on other machines; of those, and of messages quoted
without a command, every phrase must be in a string of the source (`unknown_phrases`).
"""

import ast
import contextlib
import io
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXACT = (
    "headway plan recipes/",
    "headway plan --against ",
    "headway hardware show",
    "headway model show recipes/",
    "headway train recipes/demo.toml --set train.learning_rate",
)
"""Beginnings of the commands whose output is compared, number by number."""
SLOW = (
    "headway plan --against ",
    "headway plan recipes/llama3-70b.toml --on h100x8x8 --sweep",
    "headway plan recipes/llama3-70b.toml --on h100x8x1",
)
"""Those of them that take more than two seconds."""
NO_OUTPUT = (
    "src/",
    "runs/",
    "checkpoints/",
    "[train]",
    "worker 0  ",
    "tokens-00000.bin",
    "make ",
    "export ",
    "apptainer",
)
"""Beginnings of blocks that show files, folders or commands only."""
ELISION = "..."
WIDTH = 110
"""Of pages."""


@dataclass(frozen=True)
class Quotation:
    """A command and its quoted output."""

    page: Path
    line: int
    """Of the command, in the page."""
    command: str
    """Without the `$`; empty for messages quoted alone."""
    output: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the command can be run anew."""
        return self.command.startswith(EXACT)

    @property
    def name(self) -> str:
        """Where it is, for people."""
        return f"{self.page.relative_to(ROOT)}:{self.line} {self.command}".strip()


def pages() -> list[Path]:
    """Return every page written by hand."""
    docs = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reference"]
    return sorted([*docs, *ROOT.glob("*.md")])


def quotations(page: Path) -> Iterator[Quotation]:
    """Yield the quoted output of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    for block in FENCE.finditer(text):
        if block[1] not in ("", "console") or block[2].startswith(NO_OUTPUT):
            continue
        start = text[: block.start()].count("\n") + 2
        yield from _split(page, start, block[2].splitlines())


def _split(page: Path, start: int, lines: list[str]) -> Iterator[Quotation]:
    """Yield the commands of a block, each with its output."""
    command, at, output = "", start, list[str]()
    is_continued = False
    for number, line in enumerate(lines, start):
        if is_continued or line.startswith("$ "):
            if not is_continued:
                if output:
                    yield Quotation(page, at, command, tuple(output))
                command, at, output = "", number, []
            command += line.removeprefix("$ ").removesuffix("\\")
            is_continued = line.endswith("\\")
        elif not line.startswith(("headway ", "HEADWAY_")):
            output.append(line)
    if output:
        yield Quotation(page, at, command, tuple(output))


# -- commands that are run anew


def run(command: str) -> list[str]:
    """Return what a command of the README prints, both streams, on a terminal of 80 columns."""
    from headway.cli.main import main

    words = shlex.split(re.sub(r"\s+#.*$", "", command))
    printed, before, folder = io.StringIO(), sys.argv, Path.cwd()
    os.chdir(ROOT)
    sys.argv = words
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = before
        os.chdir(folder)
    return [line for text in printed.getvalue().rstrip("\n").splitlines() for line in _wrapped(text)]


def _wrapped(line: str) -> list[str]:
    """Return a long message as a wide terminal shows it; other lines as they are."""
    if len(line) <= WIDTH or not line.startswith(("error: ", "hint:  ")):
        return [line]
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * 7, break_long_words=False, break_on_hyphens=False)


def first_difference(quoted: Iterable[str], printed: list[str]) -> str | None:
    """Return the first quoted line that is not printed at its place; None if all are."""
    place, is_anywhere = 0, False
    for line in quoted:
        if line.strip() == ELISION:
            is_anywhere = True
            continue
        rest = printed[place:]
        if line not in (rest if is_anywhere else rest[:1]):
            return line
        place, is_anywhere = place + rest.index(line) + 1, False
    return None if is_anywhere or place == len(printed) else printed[place]


def renewed(quotation: Quotation, printed: list[str]) -> str:
    """Return the page of a quotation with what its command prints; where lines are left out, a person has to choose."""
    if ELISION in (line.strip() for line in quotation.output):
        raise SystemExit(f"{quotation.name}: choose anew what to quote: some lines are left out")
    lines = quotation.page.read_text(encoding="utf-8").splitlines()
    first = quotation.line  # the command's number, counted from one: the index of the line after it
    while lines[first - 1].endswith("\\"):
        first += 1
    lines[first : first + len(quotation.output)] = printed
    return "\n".join(lines) + "\n"


# -- phrases that the code can print

PLAIN = re.compile(r"[A-Za-z][A-Za-z'-]*[,:;.]?")
VALUE = "\0"
OTHERS = (
    "Input should be greater than or equal to",
    "invalid continuation byte",
    "mat1 and mat2 shapes cannot be multiplied",
)
"""Phrases of Pydantic, Python and PyTorch inside our messages."""
VALUES = {
    "ada",
    "big",
    "c",
    "gpt",
    "on-ray",
    "on-slurm",
    "oom",
    "passes",
    "processes",
    "runtimeerror",
    "tiny",
    "tonight",
    "vm",
}
"""Values in quoted output that are words: names of runs, machines and columns of somebody's data."""


@dataclass(frozen=True)
class Phrases:
    """The words of all strings of the package."""

    pairs: frozenset[tuple[str, str]]
    """Words that follow each other in a string."""
    before_value: frozenset[str]
    """Words that end a string, or stand before an inserted value."""
    after_value: frozenset[str]


@cache
def phrases() -> Phrases:
    """Return the words of every string of the package, as they follow each other."""
    pairs, before, after = set[tuple[str, str]](), set[str](), set[str]()
    for text in _strings():
        words = text.replace("~", " ").replace(VALUE, f" {VALUE} ").split()
        words = [VALUE if re.fullmatch(r"[\W\0]+", word) else _bare(word) for word in words]
        pairs |= {*pairwise(words)}
        before |= {first for first, second in pairwise([*words, VALUE]) if second == VALUE}
        after |= {second for first, second in pairwise([VALUE, *words]) if first == VALUE}
    return Phrases(frozenset(pairs), frozenset(before), frozenset(after))


def _strings() -> Iterator[str]:
    """Yield every string of the package, with a mark where a value is inserted."""
    yield from OTHERS
    for file in (ROOT / "src" / "headway").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings are not printed
        for node in ast.walk(tree):
            if id(node) in notes:
                continue
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def unknown_phrases(quotation: Quotation) -> list[str]:
    """Return the pairs of words of a quotation that no string of the package holds.

    Two words may also come from two strings, or one of them may be a value.
    """
    known = phrases()
    values = {*re.findall(r"[\w-]+", quotation.command.lower()), *VALUES}

    def is_known(first: str, second: str) -> bool:
        ends = first in known.before_value or first in values
        begins = second in known.after_value or second in values
        return (first, second) in known.pairs or (ends and begins)

    return [
        f"{first} {second}"
        for line in quotation.output
        for first, second in pairwise(line.split())
        if PLAIN.fullmatch(first) and PLAIN.fullmatch(second) and not is_known(_bare(first), _bare(second))
    ]


def _bare(word: str) -> str:
    return word.strip(",:;.()\"'`").lower()
