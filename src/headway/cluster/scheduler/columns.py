"""Rows of one kind as columns: arrays that grow, are updated in place, and are read whole."""

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, Self

import numpy as np

__all__ = ["Columns"]


class Columns:
    """A table whose columns are attributes: `jobs.gpus[row]`. Rows are numbers and stay; freed ones come again."""

    def __init__(self, kinds: Mapping[str, tuple[Any, Any]], room: int = 16) -> None:
        """`kinds`: of each column its dtype and what a new row has there."""
        self._kinds = dict(kinds)
        self._freed: list[int] = []
        self.names: list[str] = []
        self.rows: dict[str, int] = {}
        """Where the row of a name is."""
        for name, (dtype, empty) in self._kinds.items():
            setattr(self, name, np.full(room, empty, dtype))

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, name: str, **values: Any) -> int:
        """A new row; its number."""
        assert name not in self.rows, f"{name} is there already"
        if self._freed:
            row = self._freed.pop()
            self.names[row] = name
        else:
            row = len(self.names)
            self.names.append(name)
            self._grow(row + 1)
        self.rows[name] = row
        for column, (_, empty) in self._kinds.items():
            getattr(self, column)[row] = values.get(column, empty)
        return row

    def drop(self, row: int) -> None:
        """Forget a row; its number will be another's."""
        del self.rows[self.names[row]]
        self._freed.append(row)

    def copy(self) -> Self:
        """Another that learns nothing of what happens to this one."""
        made = copy(self)
        made._freed, made.names, made.rows = self._freed.copy(), self.names.copy(), self.rows.copy()
        for column in self._kinds:
            setattr(made, column, getattr(self, column).copy())
        return made

    def record(self, row: int) -> dict[str, Any]:
        """One row as plain values, with its name."""
        return {"name": self.names[row]} | {column: getattr(self, column)[row].item() for column in self._kinds}

    def records(self, rows: Iterable[int]) -> list[dict[str, Any]]:
        """Several of them."""
        return [self.record(row) for row in rows]

    def _grow(self, size: int) -> None:
        for name, (dtype, empty) in self._kinds.items():
            column = getattr(self, name)
            if size > len(column):
                larger = np.full(max(size, 2 * len(column)), empty, dtype)
                larger[: len(column)] = column
                setattr(self, name, larger)
