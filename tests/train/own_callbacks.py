"""Callbacks as a user would write them; workers import them by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import headway as hw


class Diary:
    """Writes what it is told, and stops the run at a step."""

    def __init__(self, file: str, stop_at: int | None = None) -> None:
        self.file, self.stop_at = Path(file), stop_at

    def begin(self, run: Path, recipe: Any, step: int) -> None:
        self._write("begin", step, {"batch": recipe.train.batch, "run": run.name})

    def step(self, step: int, metrics: Mapping[str, float]) -> bool:
        self._write("step", step, metrics)
        return step == self.stop_at

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("evaluated", step, metrics)

    def end(self, step: int) -> None:
        self._write("end", step, {})

    def _write(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([kind, step, dict(metrics)]) + "\n")


class Broken:
    """Raises at its second step."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            raise KeyError("accuracy")


class Silent:
    """Has no method of a callback."""


class Logging:
    """Logs what it is told."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        hw.log({"own/double": 2 * metrics["loss"]})
        if step == 2:
            hw.log({"grid": hw.Image([[0, 255]])})
