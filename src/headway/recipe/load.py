"""From TOML files and `--set key=value` to a Recipe and back to TOML.

Errors name the file, the key, and the nearest names or the range that is allowed.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headway.errors import RecipeError, what_is_wrong
from headway.recipe.families import FAMILIES, MODEL_TYPES, families_with
from headway.recipe.schema import Recipe

__all__ = ["leaves", "load_recipe", "nearest_keys", "parse_recipe", "to_toml", "with_settings"]

LIST_ALL = "headway recipe schema lists all"
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def load_recipe(file: Path, settings: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, follow its `extends`, and apply `key=value` settings on top."""
    values, origins = _read_file(file, chain=())
    for setting in settings:
        key, value = _parse_setting(setting)
        _assign(values, origins, key, value)
    return parse_recipe(values, origins, default_origin=str(file))


def with_settings(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """The same recipe with `key=value` settings applied."""
    values, origins = recipe.model_dump(), dict[str, str]()
    for setting in settings:
        key, value = _parse_setting(setting)
        _assign(values, origins, key, value)
    return parse_recipe(values, origins, default_origin="recipe")


def to_toml(recipe: Recipe) -> str:
    """A recipe as TOML that loads back to an equal one; keys without a value are left as comments."""
    return "\n".join(list(_table((), recipe.model_dump()))[:-1])


def _table(path: tuple[str, ...], values: Mapping[str, Any]) -> Iterable[str]:
    """The lines of a table and of those inside it, each table with a blank line after it."""
    if path:
        yield f"[{'.'.join(map(_key, path))}]"
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    for key, value in values.items():
        if key not in tables:
            yield f"# {key} is not set" if value is None else f"{_key(key)} = {_toml(value)}"
    yield ""
    for key, value in tables.items():
        yield from _table((*path, key), value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """A value in TOML; of a scalar that is its JSON, but for DEL."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_toml(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_recipe(values: Mapping[str, Any], origins: Mapping[str, str], default_origin: str) -> Recipe:
    """Validate plain values; `origins` says which file or option each dotted key came from."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise _explain(error, origins, default_origin) from None


def nearest_keys(key: str, limit: int = 3) -> list[str]:
    """Valid dotted keys that someone who wrote `key` may have meant, best first."""
    fields = dict(_fields(Recipe))
    section, _, word = key.rpartition(".")
    words = word.lower().replace("-", "_").split("_")
    initials = "".join(part[:1] for part in words)

    def score(candidate: str) -> float:
        place, _, name = candidate.rpartition(".")
        likeness = difflib.SequenceMatcher(None, word.lower(), name).ratio()
        if name == word:
            likeness = 1.2
        elif len(words) > 1 and name == initials:
            likeness = 1.1
        elif len(word) > 3 and all(part in fields[candidate].lower() for part in words):
            likeness = max(likeness, 0.62)
        return likeness + (0.1 if place == section else 0.0)

    ranked = sorted(fields, key=lambda candidate: -score(candidate))
    return [candidate for candidate in ranked[:limit] if score(candidate) >= 0.65]


def _read_file(file: Path, chain: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """A file's values laid over those of the file it extends, and where each dotted key came from."""
    if file.resolve() in chain:
        names = " -> ".join(str(path) for path in (*chain, file.resolve()))
        raise RecipeError(f"{file}: extends itself ({names})", hint="remove one of the extends lines")
    try:
        own = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{file}: no such recipe", hint="recipes that come with Headway are in recipes/") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file}: not valid TOML: {error}") from None
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read: {error.strerror}") from None
    base = own.pop("extends", None)
    values, origins = dict[str, Any](), dict[str, str]()
    if base is not None:
        if not isinstance(base, str):
            raise RecipeError(f"{file}: extends must name one file, not {base!r}")
        values, origins = _read_file(file.parent / base, (*chain, file.resolve()))
        _make_way(values, own)
    _lay_over(values, own, origins, str(file))
    return values, origins


def _make_way(values: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Data are one set or a mixture: a file that has the one does not extend another's other."""
    data, mine = values.get("data"), own.get("data")
    if isinstance(data, dict) and isinstance(mine, dict):
        for here, there in (("mixture", ("path", "version")), ("path", ("mixture",))):
            if here in mine:
                values["data"] = data = {key: value for key, value in data.items() if key not in there or key in mine}


def _lay_over(
    values: dict[str, Any], own: Mapping[str, Any], origins: dict[str, str], origin: str, prefix: str = ""
) -> None:
    """Put values over others, table by table; `origins` learns where each came from."""
    for key, value in own.items():
        if isinstance(value, dict):
            below = values.get(key)
            values[key] = dict(below) if isinstance(below, dict) else {}
            _lay_over(values[key], value, origins, origin, f"{prefix}{key}.")
        else:
            values[key] = value
            origins[f"{prefix}{key}"] = origin


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested values by dotted key; tables inside of lists are no keys of their own."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _parse_setting(setting: str) -> tuple[str, Any]:
    """`train.lr=3e-4` as a dotted key and a TOML value; what is not TOML is a string, nothing at all unsets."""
    key, equals, text = setting.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise RecipeError(f"--set {setting}: not of the form key=value", hint="for example --set train.lr=3e-4")
    if not text.strip():
        return key, None
    try:
        return key, tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text.strip()


def _assign(values: dict[str, Any], origins: dict[str, str], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    place = values
    for section in sections:
        deeper = place.get(section)
        if not isinstance(deeper, dict):
            deeper = {}
        place[section] = dict(deeper)
        place = place[section]
    place[name] = value
    origins[key] = "--set"


def _fields(section: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Every dotted key a recipe may have, with its description."""
    from headway.recipe.documentation import meanings  # asked for after a mistake only

    for python_name, field in section.model_fields.items():
        name = field.alias or python_name
        named = get_origin(field.annotation) is dict  # sections by names of the user's choice
        kinds = _kinds(get_args(field.annotation)[1] if named else field.annotation)
        inner = [kind for kind in kinds if _is_section(kind)]
        for kind in inner:
            yield from _fields(kind, f"{prefix}{name}.*." if named else f"{prefix}{name}.")
        if not inner:
            yield f"{prefix}{name}", meanings(section).get(python_name, "")


def _kinds(annotation: Any) -> Iterable[Any]:
    """The types that a field may be of: those of a union, without what is said of them."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return [kind for part in parts for kind in _kinds(part)] if parts else [annotation]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _explain(error: ValidationError, origins: Mapping[str, str], default_origin: str) -> RecipeError:
    """The first mistake as one sentence; the others are found once it is mended."""
    mistakes = sorted(error.errors(), key=lambda mistake: mistake["type"] != "extra_forbidden")
    first = mistakes[0]
    key = ".".join(str(part) for part in _place(first["loc"]))
    if first["type"] == "at_key":
        key += f".{first['ctx']['key']}"
    origin = _origin(key, origins) or default_origin
    if first["type"] == "at_key":
        return RecipeError(f"{origin}: {first['msg']}")
    if first["type"] == "extra_forbidden":
        section, _, name = key.rpartition(".")
        near = nearest_keys(key) or difflib.get_close_matches(key, Recipe.model_fields)
        hint = f"did you mean {' or '.join(near)}?  ({LIST_ALL})" if near else LIST_ALL
        families = families_with(name) if section == "model" else []
        if families:
            hint = f"model.family = one of {', '.join(families)} has it"
        return RecipeError(f'{origin}: {section or "a recipe"} has no key "{name}"', hint=hint)
    if first["type"] == "missing":
        key = {"data": "data.path"}.get(key, key)
        return RecipeError(f"{origin}: {key} is missing", hint=f"--set {key}=... or a line in the file gives it")
    if first["type"] == "value_error":
        return RecipeError(f"{origin}: {key}: {what_is_wrong(first)}")
    allowed = _allowed(key)
    if key == "model.family":
        kinds = sorted({*MODEL_TYPES} - {*FAMILIES})
        known = f"model.family takes one of {', '.join(FAMILIES)}; of {', '.join(kinds)} it is what model.init finds"
        return RecipeError(f"{origin}: model.family = {first['input']!r}: there is no such family", hint=known)
    return RecipeError(
        f"{origin}: {key} = {first['input']!r}: {what_is_wrong(first)}",
        hint=f"{key} takes {allowed}" if allowed else LIST_ALL,
    )


def _place(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where a mistake is, without the family by which a model section was chosen."""
    return (loc[0], *loc[2:]) if loc[0] == "model" and len(loc) > 1 else loc


def _origin(key: str, origins: Mapping[str, str]) -> str | None:
    """Where a key came from; if nobody gave just that, what it is a part of, or a part of it."""
    parts = key.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    inside = (name for name in origins if name.startswith(f"{key}."))
    return next((origins[name] for name in (*around, *inside) if name in origins), None)


def _allowed(key: str) -> str | None:
    """The range of one field in words, read from its JSON Schema."""
    schema = Recipe.model_json_schema()
    places = [schema]
    for part in key.split("."):
        found = [option for place in places for option in _alternatives(place, schema)]
        inner = [o.get("items") if part.isdecimal() else o.get("properties", {}).get(part) for o in found]
        places = [place for place in inner if place is not None]
    options = [option for place in places for option in _alternatives(place, schema) if option.get("type") != "null"]
    values = [value for o in options for value in o.get("enum", [o["const"]] if "const" in o else [])]
    if values:
        return "one of " + ", ".join(map(str, dict.fromkeys(values)))
    said = {_describe(option) for option in options}
    return said.pop() if len(said) == 1 else None


def _alternatives(place: Mapping[str, Any], schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a place of a JSON Schema may be, with references followed."""
    if "$ref" in place:
        return _alternatives(schema["$defs"][place["$ref"].rsplit("/", 1)[1]], schema)
    options = place.get("anyOf") or place.get("oneOf")
    return [found for option in options for found in _alternatives(option, schema)] if options else [place]


def _describe(schema: Mapping[str, Any]) -> str | None:
    noun = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "a string",
        "array": "a list",
        "object": "a table",
    }.get(schema.get("type", ""))
    bounds = [f"{word} {schema[name]:g}" for name, word in _BOUNDS.items() if name in schema]
    if noun and "pattern" in schema:
        return f"{noun} matching {schema['pattern']}"
    return f"{noun} {' and '.join(bounds)}".strip() if noun else None
