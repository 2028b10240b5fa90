"""Code of the user's own that a run began with: a copy of each file that its recipe names, in the run's folder.

    code/<package.module>.py
    code/commits.json           the commit of each Git repository that they are in, and a hash of changes since

Only these files, not what they import: for that, the commits are compared. Nothing is ever imported from there.
"""

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from headway.recipe.find_own_code import find_module_file
from headway.recipe.own_code import OWN_NAME
from headway.track.run_folder import RunFolder

FOLDER = "code"
MOST_BYTES = 1 << 20
"""Of a file; a longer one is no code."""
COMMITS = "commits.json"
GIT_S = 10.0
"""A repository that takes longer to say what changed is left out."""
_NAME = re.compile(OWN_NAME)


def record_code(run: RunFolder, recipe: Mapping[str, Any]) -> None:
    """Copy the files that a recipe names into the run's folder; those that are not found are left out."""
    folder, sources = run.path / FOLDER, dict[Path, None]()
    for module in sorted({name.partition(":")[0] for name in _names(recipe)}):
        file = find_module_file(module)
        if file is None or file.suffix != ".py" or file.stat().st_size > MOST_BYTES:
            continue
        folder.mkdir(exist_ok=True)
        (folder / f"{module}.py").write_bytes(file.read_bytes())
        sources[file.resolve().parent] = None
    commits = dict(commit for source in sources if (commit := find_commit(source)) is not None)
    if commits:
        (folder / COMMITS).write_bytes(to_json(commits))


def find_commit(folder: Path) -> tuple[str, str] | None:
    """Return the name of the Git repository that a folder is in, and its commit; None if there is none.

    `1a2b3c4+5d6e7f` has changes of Python files since, which have this hash.
    """
    top, commit = _git(folder, "rev-parse", "--show-toplevel"), _git(folder, "rev-parse", "HEAD")
    python = ["--", ":(top)*.py"]
    changes = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv", *python)
    new = _git(folder, "ls-files", "--others", "--exclude-standard", "--full-name", *python)
    if top is None or commit is None or changes is None or new is None:
        return None
    text = commit.decode()[:12]
    if changes or new:
        text += f"+{hashlib.sha256(changes + new).hexdigest()[:6]}"
    return Path(os.fsdecode(top)).name, text


def _git(folder: Path, *words: str) -> bytes | None:
    """Return what Git prints of a folder; None if there is no Git or no repository, or it takes too long.

    Programs that a repository's settings name are not started.
    """
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *words]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_S, env=environment, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def code_commits(run: RunFolder) -> dict[str, str]:
    """Return the commit of each repository that a run's own code is from, by its name."""
    try:
        commits = from_json((run.path / FOLDER / COMMITS).read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(name): str(commit) for name, commit in commits.items()} if isinstance(commits, dict) else {}


def code_digests(run: RunFolder) -> dict[str, str]:
    """Return the hash of each file that was copied, by its module."""
    digests = {}
    with suppress(OSError):
        for path in sorted((run.path / FOLDER).glob("*.py")):
            digests[path.stem] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return digests


def code_file(run: RunFolder, module: str) -> Path:
    """Return the path of the copy of a module."""
    return run.path / FOLDER / f"{module}.py"


def _names(value: Any) -> Iterator[str]:
    """Yield all texts in a recipe that name code."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _names(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _names(item)
