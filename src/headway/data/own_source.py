"""Sources of the user's own: `package.module:name` is called and gives rows, which are written out as JSONL and read.

A dataset's version follows from its content, so that rows from code are as exact as rows from files.
"""

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.errors import DataError
from headway.recipe.own_code import OWN_NAME, describe_error, load_name


@contextmanager
def own_sources(sources: Sequence[str], beside: Path) -> Iterator[list[str]]:
    """Yield sources with those of the user's own replaced by files, which exist meanwhile in a folder `beside`."""
    own = [source for source in sources if re.match(OWN_NAME, source) and not Path(source).exists()]
    if not own:
        yield list(sources)
        return
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".rows-", dir=beside) as folder:
        files = {name: _written(name, Path(folder, f"{name.replace(':', '.')}.jsonl")) for name in own}
        yield [str(files.get(source, source)) for source in sources]


def _written(name: str, file: Path) -> Path:
    rows = load_name(name, "source", callable)
    count = 0
    with file.open("w", encoding="utf-8") as out:
        try:
            for row in _iterated(name, rows):
                count += 1
                out.write(json.dumps(_checked(name, count, row)) + "\n")
        except DataError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise DataError(f"{name} failed after {count:,} rows: {describe_error(error)}") from error
    return file


def _iterated(name: str, rows: Any) -> Iterable[Any]:
    """Return what a function returns, or the thing itself."""
    given = rows() if callable(rows) else rows
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise DataError(f"{name} gives a {type(given).__name__}", hint="a source gives rows: texts, or mappings")
    return given


def _checked(name: str, number: int, row: Any) -> Mapping[str, Any]:
    """Return a row as an object: a text is its field `text`."""
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, Mapping):
        raise DataError(
            f"{name}: row {number:,} is a {type(row).__name__}",
            hint='a row is a text or a mapping such as {"text": ...}',
        )
    return row
