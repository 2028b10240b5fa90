"""Descriptions of recipe keys, read on demand from the docstrings below the fields.

Pydantic could do this when sections are defined, but would then parse their source at every start of `headway`.
"""

import ast
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from headway.recipe.schema import Recipe


@lru_cache
def meanings(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a section's fields, including inherited ones."""
    texts = dict[str, str]()
    for kind in reversed(section.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            texts |= _strings(sys.modules[kind.__module__].__file__ or "").get(kind.__name__, {})
    return {name: text for name, text in texts.items() if name in section.model_fields}


@lru_cache
def _strings(file: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of annotated names, for each class of a file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: dict(_field_strings(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _field_strings(node: ast.ClassDef) -> list[tuple[str, str]]:
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
    """Return the JSON Schema of a recipe, with a description of every key."""
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
    """Return all section classes inside a section, by name."""
    sections = dict[str, type[BaseModel]]()
    for field in section.model_fields.values():
        for kind in _sections_in(field.annotation):
            sections |= {kind.__name__: kind} | _sections(kind)
    return sections


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes in a type annotation, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in getattr(annotation, "__args__", ()) for kind in _sections_in(part)]
