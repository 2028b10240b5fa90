"""Struct-of-arrays tables: one NumPy array per column, grown and updated in place."""

from copy import copy
from typing import Any, NamedTuple, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=np.generic)


class _Column(NamedTuple):
    dtype: Any
    default: Any

    def full(self, length: int) -> NDArray[Any]:
        return np.full(length, self.default, self.dtype)


def column(dtype: type[T] | np.dtype[T], default: object) -> NDArray[T]:
    """Declare a column of a table: its dtype, and its value in a new row."""
    return cast(NDArray[T], _Column(dtype, default))


class Columns:
    """A table whose columns are attributes: `jobs.gpus[row]`. A row keeps its number; freed numbers are reused."""

    def __init__(self, capacity: int = 16) -> None:
        self._columns = {name: spec for name, spec in vars(type(self)).items() if isinstance(spec, _Column)}
        self._freed: list[int] = []
        self.names: list[str] = []
        self.rows: dict[str, int] = {}
        """Row number by name."""
        for name, spec in self._columns.items():
            setattr(self, name, spec.full(capacity))

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, name: str, **values: Any) -> int:
        """Add a row and return its number."""
        assert name not in self.rows, f"{name} exists"
        if self._freed:
            row = self._freed.pop()
            self.names[row] = name
        else:
            row = len(self.names)
            self.names.append(name)
            self._grow(row + 1)
        self.rows[name] = row
        for key, spec in self._columns.items():
            getattr(self, key)[row] = values.get(key, spec.default)
        return row

    def drop(self, row: int) -> None:
        """Remove a row; its number will be reused."""
        del self.rows[self.names[row]]
        self._freed.append(row)

    def copy(self) -> Self:
        """Return an independent copy."""
        table = copy(self)
        table._freed, table.names, table.rows = self._freed.copy(), self.names.copy(), self.rows.copy()
        for name in self._columns:
            setattr(table, name, getattr(self, name).copy())
        return table

    def record(self, row: int) -> dict[str, Any]:
        """Return a row as plain values, with its name."""
        return {"name": self.names[row]} | {name: getattr(self, name)[row].item() for name in self._columns}

    def _grow(self, length: int) -> None:
        for name, spec in self._columns.items():
            values = getattr(self, name)
            if length > len(values):
                larger = spec.full(max(length, 2 * len(values)))
                larger[: len(values)] = values
                setattr(self, name, larger)
