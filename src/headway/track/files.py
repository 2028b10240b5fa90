"""Small files of a run, replaced whole or not at all."""

from pathlib import Path
from typing import Any

from pydantic_core import to_json

__all__ = ["write_json"]


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old one or the new one, never half of one."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_bytes(to_json(value, indent=2) + b"\n")
    beside.replace(path)
