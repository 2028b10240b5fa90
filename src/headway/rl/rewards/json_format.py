"""The `json` reward: an answer that is JSON, and has the shape that a small schema describes."""

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from headway.rl.rewards.answer import Answer

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
"""Types of a schema, and how Python has them."""
KEYWORDS = ("type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum")
"""Of JSON Schema, what is understood; any other keyword is refused instead of being ignored."""

_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL | re.IGNORECASE)


def _checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema; raise ValueError with what is not understood."""
    for keyword, value in schema.items():
        if keyword not in KEYWORDS:
            raise ValueError(f"keyword {keyword!r} is not supported: {', '.join(KEYWORDS)}")
        if keyword == "type" and value not in TYPES:
            raise ValueError(f"there is no type {value!r}: {', '.join(TYPES)}")
        inner = value.values() if keyword == "properties" else [value] if keyword == "items" else []
        for part in inner:
            _checked_schema(part)
    return schema


def json_reward(
    answer: Answer,
    *,
    shape: Annotated[dict[str, Any] | None, AfterValidator(lambda value: value and _checked_schema(value))] = None,
    partial: Annotated[float, Field(ge=0, le=1)] = 0.0,
) -> float:
    """Return 1.0 if the answer is JSON, alone or in one code block, and has the shape that a schema describes.

    JSON of another shape is worth `partial`.
    """
    fenced = _FENCED.fullmatch(answer.text)
    try:
        value = json.loads(fenced[1] if fenced else answer.text, parse_constant=_refuse_constant)
        return 1.0 if shape is None or has_shape(value, shape) else partial
    except (ValueError, RecursionError):  # numbers of too many digits, and thousands of open brackets, too
        return 0.0


def has_shape(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a JSON value is as a schema of `KEYWORDS` describes it."""
    if "type" in schema and not _is_of_type(value, schema["type"]):
        return False
    if "enum" in schema and not any(_is_same(value, choice) for choice in schema["enum"]):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        if any(key not in value for key in schema.get("required", ())):
            return False
        if schema.get("additionalProperties") is False and not value.keys() <= properties.keys():
            return False
        return all(has_shape(value[key], part) for key, part in properties.items() if key in value)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return False
        return all(has_shape(item, schema.get("items", {})) for item in value)
    return True


def _is_of_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):  # an int to Python
        return name == "boolean"
    return isinstance(value, TYPES[name]) or (name == "integer" and isinstance(value, float) and value.is_integer())


def _is_same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
