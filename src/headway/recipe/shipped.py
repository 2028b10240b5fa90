"""The recipes and cluster files that come with Headway: what each is for, and the files to copy for one.

A wheel holds them as `headway/recipes/` (pyproject.toml); in a clone of the repository they are its folder `recipes/`.
"""

import difflib
import shlex
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import UsageError

PACKAGE = Path(__file__).resolve().parents[1]
DEMO_DATA = "data/python-stdlib"
"""The dataset of the recipes that need no download: Python's own source."""
COMMANDS = ("headway ", "python ")
"""How the commands in a file's comment begin."""


@dataclass(frozen=True)
class ShippedFile:
    """A recipe or a cluster file that comes with Headway."""

    name: str
    """Path below the folder of recipes, without its ending: `demo`, `clusters/h100-rail`."""
    path: Path

    @property
    def summary(self) -> str:
        """What it is for: the first sentence of the comment at its top."""
        text = " ".join(line for line in self._comment if not line.startswith(COMMANDS))
        return text.partition(". ")[0].removesuffix(".") + "."

    def commands(self, copy: Path, folder: Path = Path()) -> list[str]:
        """Return what to type next with a copy of it, in `folder`."""
        texts = [line for line in self._comment if line.startswith(COMMANDS)]
        texts = [text.replace(f"recipes/{self.name}.toml", shlex.quote(str(copy))) for text in texts]
        if _values(self.path).get("data", {}).get("path") != DEMO_DATA:
            return texts
        texts = texts or [f"headway train {shlex.quote(str(copy))}"]
        return texts if (folder / DEMO_DATA).exists() else [build_demo_data(), *texts]

    @property
    def _comment(self) -> list[str]:
        """The lines of the comment at its top, without the marks."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
        return [line.lstrip("# ").rstrip() for line in lines[:end]]


def shipped_folder() -> Path:
    """Return the folder of recipes that come with Headway."""
    packaged = PACKAGE / "recipes"
    return packaged if packaged.is_dir() else PACKAGE.parents[1] / "recipes"


def shipped_files() -> list[ShippedFile]:
    """Return every recipe, then every cluster file, by name."""
    folder = shipped_folder()
    paths = [*sorted(folder.glob("*.toml")), *sorted(folder.glob("*/*.toml"))]
    return [ShippedFile(path.relative_to(folder).with_suffix("").as_posix(), path) for path in paths]


def shipped_file(name: str) -> ShippedFile:
    """Return the one with this name; `demo.toml` and `recipes/demo.toml` mean `demo`."""
    files = {file.name: file for file in shipped_files()}
    wanted = name.removesuffix(".toml").removeprefix("recipes/")
    if wanted in files:
        return files[wanted]
    near = difflib.get_close_matches(wanted, files, n=3, cutoff=0.4)
    hint = (
        f"did you mean {' or '.join(near)}?  (headway recipe ls lists all)" if near else "headway recipe ls lists all"
    )
    raise UsageError(f"Headway comes with no recipe named {name!r}", hint=hint)


def with_bases(path: Path) -> list[Path]:
    """Return a recipe's file and those that it extends, each in the folder of the one before."""
    base = _values(path).get("extends")
    return [path, *(with_bases(path.parent / base) if base else ())]


def build_demo_data() -> str:
    """Return the command that builds `DEMO_DATA` from the source of this Python."""
    sources = f"{sysconfig.get_path('stdlib')}/*.py"
    return f"headway data build {DEMO_DATA} {shlex.quote(sources)} --vocab-size 2048"


def _values(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
