"""Stream documents from Parquet files: one per row, only the needed columns, a batch of rows at a time."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.errors import DamagedData, DataError

Row = tuple[int, dict[str, bytes | None], int]
"""(number from 1, the columns' bytes by name, approximate position in the file on disk)."""

_BATCH_ROWS = 512
_BUFFER_BYTES = 1 << 20
_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def read_rows(path: Path, columns: list[str], file_bytes: int) -> Iterator[Row]:
    """Yield the rows of a file in order, with None for null values."""
    arrow, _ = _pyarrow(path)

    def check(schema: Any) -> list[str]:
        _check_columns(arrow, path, schema, columns)
        return columns

    for batch, first, total in _batches(path, check):
        values = [_as_bytes(arrow, batch.column(name)) for name in columns]
        for number, row in enumerate(zip(*values, strict=True), start=first):
            yield number, dict(zip(columns, row, strict=True)), file_bytes * number // max(total, 1)


def read_dicts(
    path: Path, columns: Sequence[str] | None, file_bytes: int, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, dict[str, Any] | None, int]]:
    """Yield the rows of a file as Python objects, of the columns that it has, by default all; None if a row from 0 is
    not wanted."""

    def choose(schema: Any) -> list[str]:
        return [name for name in (schema.names if columns is None else columns) if name in schema.names]

    for batch, first, total in _batches(path, choose):
        needed = [wanted(first - 1 + index) for index in range(batch.num_rows)]
        rows = batch.to_pylist() if any(needed) else [None] * batch.num_rows
        for number, (row, need) in enumerate(zip(rows, needed, strict=True), start=first):
            yield number, row if need else None, file_bytes * number // max(total, 1)


def _batches(path: Path, choose: Callable[[Any], list[str]]) -> Iterator[tuple[Any, int, int]]:
    """Yield (rows, number of the first from 1, rows of the file) of the chosen columns, a batch at a time."""
    arrow, parquet = _pyarrow(path)
    try:
        # Neither pre-buffering nor threads: both would hold whole row groups in memory.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            columns, number = choose(file.schema_arrow), 1
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns, use_threads=False):
                yield batch, number, file.metadata.num_rows
                number += batch.num_rows
    except arrow.ArrowException as error:
        raise DamagedData(
            f"{path} is not a complete Parquet file: {str(error).splitlines()[0]}", hint="download or write it again"
        ) from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)  # Arrow's own message repeats the path
        raise DamagedData(f"cannot read {path}: {why}", hint="download or write it again") from None


def _check_columns(arrow: Any, path: Path, schema: Any, columns: list[str]) -> None:
    for name in columns:
        if name not in schema.names:
            raise DataError(
                f"{path} has no column {name!r}; it has {', '.join(schema.names) or 'none'}",
                hint="choose columns with --text-field and --prompt-field",
            )
        kind = schema.field(name).type
        kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
        if not any(getattr(arrow.types, f"is_{text_type}")(kind) for text_type in _TEXT_TYPES):
            raise DataError(f"column {name!r} of {path} is {kind}, not text", hint="choose another with --text-field")


def _as_bytes(arrow: Any, column: Any) -> list[bytes | None]:
    """Return a column's values as bytes; the caller checks row by row whether they are UTF-8."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values: list[bytes | None] = column.cast(arrow.large_binary()).to_pylist()
    return values


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"cannot read {path}: the pyarrow package is not installed",
            hint="pip install 'headway[parquet]', or write it as JSONL",
        ) from None
    return pyarrow, pyarrow.parquet
