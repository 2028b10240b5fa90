"""The rows of a task's data: JSONL (plain, gzip or Zstandard), Parquet, or a text file as one document."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.data.compressed import COMPRESSED_SUFFIXES, open_plain
from headway.errors import DamagedData, DataError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = (*JSONL_SUFFIXES, ".parquet", ".txt")


@dataclass(frozen=True)
class Row:
    """A row, and where it is."""

    where: str
    """The file and the line or row, for messages."""
    fields: dict[str, Any]


def data_suffix(path: Path) -> str | None:
    """Return the suffix of a data file, without that of its compression; None if it is no data file."""
    name = path.name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def read_rows_of(path: Path) -> list[Row]:
    """Return all rows of a file; raise DataError with the line or row that is wrong."""
    suffix = data_suffix(path)
    if suffix is None:
        raise DataError(f"{path} is no data of a task", hint=f"it ends with one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"file {path} does not exist", hint="check the path; nothing is downloaded")
    try:
        rows = list(_parquet(path) if suffix == ".parquet" else _text(path) if suffix == ".txt" else _jsonl(path))
    except OSError as error:
        raise DamagedData(f"cannot read {path}: {error.strerror or error}") from None
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _jsonl(path: Path) -> Iterator[Row]:
    with open_plain(path) as (plain, _):
        for number, line in enumerate(plain, start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                fields = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                raise DataError(f"{where}: not UTF-8") from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({error})", hint="write one JSON object per line") from None
            if b"\\u" in line and not _is_text(fields):
                raise DataError(f"{where}: holds half a surrogate pair", hint="write it as UTF-8 text")
            if not isinstance(fields, dict):
                raise DataError(f"{where}: a JSON {type(fields).__name__}, not an object")
            yield Row(where, fields)


def _is_text(fields: Any) -> bool:
    """Whether all strings are text: JSON can encode half a surrogate pair, which is no character."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(path: Path) -> Iterator[Row]:
    with open_plain(path) as (plain, _):
        try:
            text = plain.read().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise DataError(f"{path} is not UTF-8 text") from None
    if text:
        yield Row(str(path), {"text": text})


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"cannot read {path}: the pyarrow package is not installed",
            hint="pip install 'headway[parquet]', or write it as JSONL",
        ) from None
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise DamagedData(f"{path} is not a complete Parquet file: {str(error).splitlines()[0]}") from None
    for number, fields in enumerate(table.to_pylist(), start=1):
        yield Row(f"{path} row {number}", fields)
