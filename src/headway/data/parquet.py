"""Documents from Parquet files: one a row, a batch of rows at a time and the columns that are asked for."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headway.errors import DataError

__all__ = ["Row", "read_rows"]

Row = tuple[int, dict[str, bytes | None], int]
"""(number from 1, the columns' bytes by name, bytes of the file on disk read so far)."""

_BATCH_ROWS = 512
_BUFFER_BYTES = 1 << 20


def read_rows(path: Path, columns: list[str], file_bytes: int) -> Iterator[Row]:
    """The rows of a file, in order; None where a column has no value."""
    arrow, parquet = _pyarrow(path)
    try:
        # Not pre-buffered, and without threads: both would hold whole row groups in memory.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            _check_columns(arrow, path, file.schema_arrow, columns)
            total, number = file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns, use_threads=False):
                values = [_as_bytes(arrow, batch.column(name)) for name in columns]
                for row in zip(*values, strict=True):
                    number += 1
                    yield number, dict(zip(columns, row, strict=True)), file_bytes * number // max(total, 1)
    except arrow.ArrowException as error:
        raise DataError(
            f"{path} is not a whole Parquet file: {str(error).splitlines()[0]}", hint="fetch or write it again"
        ) from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)  # Arrow's own words repeat the path
        raise DataError(f"cannot read {path}: {why}", hint="fetch or write it again") from None


def _check_columns(arrow: Any, path: Path, schema: Any, columns: list[str]) -> None:
    for name in columns:
        if name not in schema.names:
            raise DataError(
                f"{path} has no column {name!r}; it has {', '.join(schema.names) or 'none'}",
                hint="--text-field and --prompt-field name columns",
            )
        kind = schema.field(name).type
        kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
        if not any(test(kind) for test in _tests(arrow.types)):
            raise DataError(f"column {name!r} of {path} is {kind}, not text", hint="--text-field names another")


def _tests(types: Any) -> list[Callable[[Any], bool]]:
    return [
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
    ]


def _as_bytes(arrow: Any, column: Any) -> list[bytes | None]:
    """A column's values as bytes: whether they are UTF-8 is for the caller to see, row by row."""
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
            f"{path} is a Parquet file, and the pyarrow package is not installed",
            hint="pip install 'headway[parquet]', or write it as JSONL",
        ) from None
    return pyarrow, pyarrow.parquet
