"""Code of the user's own that a run began with: a copy of each file that its recipe names, in the run's folder.

    code/<package.module>.py

Only these files, not what they import. They are copied and compared, never imported from there.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.recipe.find_own_code import find_module_file
from headway.recipe.own_code import OWN_NAME
from headway.track.runs import RunFolder

FOLDER = "code"
MOST_BYTES = 1 << 20
"""Of a file; a longer one is no code."""
_NAME = re.compile(OWN_NAME)


def record_code(run: RunFolder, recipe: Mapping[str, Any]) -> None:
    """Copy the files that a recipe names into the run's folder; those that are not found are left out."""
    for module in sorted({name.partition(":")[0] for name in _names(recipe)}):
        file = find_module_file(module)
        if file is None or file.suffix != ".py" or file.stat().st_size > MOST_BYTES:
            continue
        folder = run.path / FOLDER
        folder.mkdir(exist_ok=True)
        (folder / f"{module}.py").write_bytes(file.read_bytes())


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
