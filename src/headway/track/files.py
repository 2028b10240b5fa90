"""Small files of a run: replaced whole or not at all, and named when they are damaged."""

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from headway.errors import RunError
from headway.recipe import Recipe
from headway.recipe.upgrade import upgrade_recipe
from headway.track.runs import RunFolder

__all__ = ["make_durable", "read_recipe", "write_json"]


def read_recipe(run: RunFolder) -> Recipe:
    """The resolved recipe of a run."""
    path = run.recipe_file
    try:
        return upgrade_recipe(from_json(path.read_bytes()))
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}", hint="without its recipe a run cannot go on"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "all of it"
        raise RunError(
            f"{path} is not the recipe of a run: {key}: {first['msg']}", hint="put back the file that was there"
        ) from None
    except ValueError as error:
        raise RunError(f"{path} is not the recipe of a run: {error}", hint="put back the file that was there") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old one or the new one, never half of one."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_bytes(to_json(value, indent=2) + b"\n")
    beside.replace(path)


def make_durable(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
