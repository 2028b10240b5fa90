"""What every key of a recipe means, read from the strings below the fields when somebody asks.

Pydantic can do so for every section as it is defined, and then reads and parses the source whenever `headway` starts.
"""

import ast
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from headway.recipe.schema import Recipe

__all__ = ["meanings", "recipe_schema"]


@lru_cache
def meanings(section: type[BaseModel]) -> dict[str, str]:
    """A section's fields and the strings below them, with those of what it derives from."""
    found = dict[str, str]()
    for kind in reversed(section.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            found |= _strings(sys.modules[kind.__module__].__file__ or "").get(kind.__name__, {})
    return {name: text for name, text in found.items() if name in section.model_fields}


@lru_cache
def _strings(file: str) -> dict[str, dict[str, str]]:
    """The strings below annotated names of each class of a file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: dict(_below(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _below(node: ast.ClassDef) -> list[tuple[str, str]]:
    return [
        (field.target.id, after.value.value)
        for field, after in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    ]


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, with what every key means."""
    schema: dict[str, Any] = Recipe.model_json_schema()
    _describe(schema, Recipe)
    for name, kind in _sections(Recipe).items():
        _describe(schema["$defs"][name], kind)
    return schema


def _describe(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    for name, text in meanings(kind).items():
        field = schema["properties"].get(kind.model_fields[name].alias or name)
        if field is not None:
            field["description"] = " ".join(text.split())


def _sections(section: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """All kinds of sections inside of one, by name."""
    found = dict[str, type[BaseModel]]()
    for field in section.model_fields.values():
        for kind in _named_in(field.annotation):
            found |= {kind.__name__: kind} | _sections(kind)
    return found


def _named_in(annotation: Any) -> list[type[BaseModel]]:
    """Sections that a type names, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in getattr(annotation, "__args__", ()) for kind in _named_in(part)]
