"""Small files of a run: written atomically, with errors that name a damaged file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import ValidationError, from_json, to_json

from headway.errors import RunError
from headway.track.run_folder import RunFolder

if TYPE_CHECKING:
    from headway.recipe import Recipe


def read_recipe(run: RunFolder) -> "Recipe":
    """Return the resolved recipe of a run; raise RunError if it is missing or invalid."""
    from headway.recipe.upgrade import upgrade_recipe  # a third of the start of `headway runs`, which needs none

    path = run.recipe_file
    try:
        return upgrade_recipe(from_json(path.read_bytes()))
    except OSError as error:
        raise RunError(
            f"cannot read {path}: {error.strerror}", hint="a run cannot resume without its recipe: restore the file"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise RunError(
            f"{path} is not a valid recipe: {key}: {first['msg']}", hint="restore the original file"
        ) from None
    except ValueError as error:
        raise RunError(f"{path} is not a valid recipe: {error}", hint="restore the original file") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: a reader sees the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(to_json(value, indent=2) + b"\n")
    partial.replace(path)


def make_durable(path: Path) -> None:
    """fsync a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
