"""Load recipes from TOML files and `--set key=value`, and write them as TOML.

Errors name the file and the key, with the closest valid names or the allowed range as a hint.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headway.errors import RecipeError, plural, suggest, what_is_wrong
from headway.recipe.families import MODEL_TYPES, families_with, family_names
from headway.recipe.objective import KINDS
from headway.recipe.schema import Parallel, Recipe

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
    return _with_settings(values, origins, settings, default_origin=str(file))


def with_settings(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """Return the recipe with `key=value` settings applied."""
    return _with_settings(recipe.model_dump(), {}, settings, default_origin="recipe")


def with_mesh(recipe: Recipe, mesh: Parallel, named: str) -> Recipe:
    """Return the recipe with another section [parallel]; an error says that what is `named` is to blame."""
    try:
        return Recipe.model_validate(recipe.model_dump() | {"parallel": mesh.model_dump()})
    except ValidationError as error:
        raise _explain(error, {}, named, named) from None


def _with_settings(
    values: dict[str, Any], origins: dict[str, str], settings: Iterable[str], default_origin: str
) -> Recipe:
    """Validate values with `key=value` settings applied; an error names the setting that is to blame, if one is."""
    states = [deepcopy(values)]
    settings = list(settings)
    for setting in settings:
        key, value = _parse_setting(setting)
        _assign(values, origins, key, value, f"--set {setting}")
        states.append(deepcopy(values))
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = _identity(_mistakes(error)[0])
        wrong = [first in _identities(state) for state in states]
        turns = [i for i in range(len(settings)) if wrong[i + 1] and not wrong[i]]
        blamed = f"--set {settings[turns[-1]]}" if turns else None
        raise _explain(error, origins, default_origin, blamed) from None


def _identities(values: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    """Return what identifies each mistake of these values."""
    try:
        Recipe.model_validate(values)
    except ValidationError as error:
        return {_identity(mistake) for mistake in error.errors()}
    return set()


def _identity(mistake: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return where a mistake is and what kind it is, whatever the values: numbers in its message may be others."""
    return mistake["loc"], mistake["type"], re.sub(r"[\d.,]+", "", mistake["msg"])


def _mistakes(error: ValidationError) -> list[Any]:
    """Return all mistakes, best first: an unknown kind of section, which makes its keys unknown, then unknown keys."""

    def rank(mistake: Any) -> int:
        if ".".join(map(str, _field_path(mistake["loc"]))) in ("model.family", "objective.kind"):
            return 0
        return 1 if mistake["type"] == "extra_forbidden" else 2

    return sorted(error.errors(), key=rank)


def to_toml(recipe: Recipe) -> str:
    """Return a recipe as TOML that loads back to an equal one; unset keys are comments."""
    return "\n".join(list(_table((), recipe.model_dump()))[:-1])


def _table(path: tuple[str, ...], values: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines of a table and its subtables, each followed by a blank line."""
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
    """Return a value as TOML; a scalar's TOML is its JSON, except for DEL."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_toml(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_recipe(values: Mapping[str, Any], origins: Mapping[str, str], default_origin: str) -> Recipe:
    """Validate plain values; `origins` maps each dotted key to the file or option it came from."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise _explain(error, origins, default_origin) from None


def nearest_keys(key: str, limit: int = 3) -> list[str]:
    """Return valid dotted keys similar to `key`, best first."""
    fields = dict(_fields(Recipe))
    section, _, word = key.rpartition(".")
    parts = word.lower().replace("-", "_").split("_")
    initials = "".join(part[:1] for part in parts)

    def score(candidate: str) -> float:
        candidate_section, _, name = candidate.rpartition(".")
        likeness = difflib.SequenceMatcher(None, word.lower(), name).ratio()
        if name == word:
            likeness = 1.2
        elif len(parts) > 1 and name == initials:
            likeness = 1.1
        elif len(word) > 3 and all(part in fields[candidate].lower() for part in parts):
            likeness = max(likeness, 0.62)
        return likeness + (0.1 if candidate_section == section else 0.0)

    ranked = sorted(fields, key=lambda candidate: -score(candidate))
    return [candidate for candidate in ranked[:limit] if score(candidate) >= 0.65]


def _read_file(file: Path, chain: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a file's values merged over those of the file it extends, and the origin of each dotted key."""
    if file.resolve() in chain:
        names = " -> ".join(str(path) for path in (*chain, file.resolve()))
        raise RecipeError(f"{file}: extends itself ({names})", hint="remove one of the extends lines")
    try:
        local = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{file}: no such recipe", hint=_near_files(file)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file}: not valid TOML: {error}") from None
    except OSError as error:
        raise RecipeError(f"cannot read {file}: {error.strerror}") from None
    base = local.pop("extends", None)
    values, origins = dict[str, Any](), dict[str, str]()
    if base is not None:
        if not isinstance(base, str):
            raise RecipeError(f"{file}: extends must name one file, not {base!r}")
        values, origins = _read_file(file.parent / base, (*chain, file.resolve()))
        _drop_other_data(values, local)
    _merge(values, local, origins, str(file))
    return values, origins


def _near_files(file: Path) -> str:
    """Return a hint with recipes of similar names: beside the missing file, else those that come with Headway."""
    beside = difflib.get_close_matches(file.stem, [path.stem for path in file.parent.glob("*.toml")], n=3)
    if beside:
        return f"did you mean {' or '.join(str(file.with_name(f'{stem}.toml')) for stem in beside)}?"
    from headway.recipe.shipped import shipped_files  # only needed for errors

    shipped = difflib.get_close_matches(file.stem, [entry.name for entry in shipped_files()], n=1)
    if shipped:
        return f"did you mean {shipped[0]}? headway recipe cp {shipped[0]} copies it here"
    return "headway recipe ls lists those of Headway, recipe cp copies one"


def _drop_other_data(values: dict[str, Any], local: Mapping[str, Any]) -> None:
    """Drop inherited dataset keys that the extending file replaces: `path` and `mixture` exclude each other."""
    data, local_data = values.get("data"), local.get("data")
    if isinstance(data, dict) and isinstance(local_data, dict):
        for choice, replaced in (("mixture", {"path", "version"}), ("path", {"mixture"})):
            if choice in local_data:
                values["data"] = data = {key: data[key] for key in data if key not in replaced - local_data.keys()}


def _merge(
    values: dict[str, Any], overrides: Mapping[str, Any], origins: dict[str, str], origin: str, prefix: str = ""
) -> None:
    """Merge `overrides` into values, table by table, and record their origin."""
    for key, value in overrides.items():
        if isinstance(value, dict):
            below = values.get(key)
            values[key] = dict(below) if isinstance(below, dict) else {}
            _merge(values[key], value, origins, origin, f"{prefix}{key}.")
        else:
            values[key] = value
            origins[f"{prefix}{key}"] = origin


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield nested values by dotted key; tables inside lists are not expanded."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _parse_setting(setting: str) -> tuple[str, Any]:
    """Parse `train.lr=3e-4` into a dotted key and a TOML value; other text is a string, no text unsets the key."""
    key, equals, text = setting.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise RecipeError(f"--set {setting}: expected key=value", hint="for example --set train.lr=3e-4")
    if not text.strip():
        return key, None
    try:
        return key, tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text.strip()


def _assign(values: dict[str, Any], origins: dict[str, str], key: str, value: Any, origin: str) -> None:
    *sections, name = key.split(".")
    table = values
    for section in sections:
        deeper = table.get(section)
        if not isinstance(deeper, dict):
            deeper = {}
        table[section] = dict(deeper)
        table = table[section]
    table[name] = value
    origins[key] = origin


def _fields(section: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield every valid dotted key with its description."""
    from headway.recipe.documentation import meanings  # only needed for errors

    for python_name, field in section.model_fields.items():
        name = field.alias or python_name
        named = get_origin(field.annotation) is dict  # sections with user-defined names
        kinds = _kinds(get_args(field.annotation)[1] if named else field.annotation)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for kind in inner:
            yield from _fields(kind, f"{prefix}{name}.*." if named else f"{prefix}{name}.")
        if not inner:
            yield f"{prefix}{name}", meanings(section).get(python_name, "")


def _kinds(annotation: Any) -> Iterable[Any]:
    """Return the types of a field: the members of a union, without annotations."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return [kind for part in parts for kind in _kinds(part)] if parts else [annotation]


def _explain(
    error: ValidationError, origins: Mapping[str, str], default_origin: str, blamed: str | None = None
) -> RecipeError:
    """Turn the first validation error into one sentence; the others show up once it is fixed.

    `blamed` is the setting without which there would be none.
    """
    first = _mistakes(error)[0]
    key = ".".join(str(part) for part in _field_path(first["loc"]))
    if first["type"] == "at_key":
        key += f".{first['ctx']['key']}"
    own = origins.get(key, "")
    origin = own if own.startswith("--set ") else blamed or _origin(key, origins) or default_origin
    elsewhere = f" ({key} is in {own})" if own not in ("", origin) else ""
    if first["type"] == "at_key":
        return RecipeError(f"{origin}: {first['msg']}{elsewhere}")
    if first["type"] == "extra_forbidden":
        section, _, name = key.rpartition(".")
        sections = Recipe.model_fields
        near = difflib.get_close_matches(key, sections, n=1, cutoff=0.8) or nearest_keys(key)
        near = near or difflib.get_close_matches(key, sections)
        hint = f"did you mean {' or '.join(near)}?  ({LIST_ALL})" if near else LIST_ALL
        families = families_with(name) if section == "model" else []
        if families:
            hint = f"these families have it: {', '.join(families)} (model.family)"
        kinds = [kind for kind, of in KINDS.items() if name in of.model_fields] if section == "objective" else []
        if kinds:
            hint = f"these objectives have it: {', '.join(kinds)} (objective.kind)"
        return RecipeError(f'{origin}: {section or "a recipe"} has no key "{name}"{elsewhere}', hint=hint)
    lacks_value = first["type"] == "missing" and isinstance(first["loc"][-1], int)
    values = _values_of_list(first["loc"]) if lacks_value or first["type"] in ("too_long", "tuple_type") else None
    if values is not None:
        return _wrong_length(key.rpartition(".")[0] if lacks_value else key, first["input"], values, origin)
    if first["type"] == "missing":
        key = {"data": "data.path"}.get(key, key)
        if origin.startswith(f"--set {key}="):
            return RecipeError(f"{origin}: {key} has no default", hint=f"--set {key}=VALUE")
        return RecipeError(f"{origin}: {key} is missing", hint=f"set it in the file or with --set {key}=...")
    section = f"{key}: " if key else ""  # else it is about several sections
    if first["type"] == "needs_setting":
        return RecipeError(f"{origin}: {section}{first['msg']}", hint=f"add {first['ctx']['hint']}")
    if first["type"] == "value_error":
        return RecipeError(f"{origin}: {section}{what_is_wrong(first)}")
    allowed = _allowed(key)
    if key == "model.family":
        name = str(first["input"])
        from_folder = f"model.init takes a Hugging Face folder of a {name}" if name in MODEL_TYPES else None
        return RecipeError(
            f"{origin}: unknown model.family {name!r}", hint=from_folder or suggest(name, family_names(), LIST_ALL)
        )
    if key == "objective.kind":
        kind = str(first["input"])
        return RecipeError(f"{origin}: unknown objective.kind {kind!r}", hint=suggest(kind, KINDS, LIST_ALL))
    itself = origin.startswith(f"--set {key}=")
    hint = f"{key} takes {allowed}" if allowed else LIST_ALL
    if itself and first["type"] == "string_type":
        hint = f"""quote it: --set '{key}="{origin.partition("=")[2]}"'"""
    what = f"{key} = {first['input']!r}: {what_is_wrong(first)}"
    return RecipeError(f"--set {what}" if itself else f"{origin}: {what}", hint=hint)


def _wrong_length(key: str, value: Any, values: Mapping[str, Any], origin: str) -> RecipeError:
    """Return the error of a list that takes a fixed number of values."""
    count, default = values["minItems"], values.get("default", [])
    example = f", for example {key}={str(default).replace(' ', '')}" if default else ""
    where = "--set " if origin.startswith(f"--set {key}=") else f"{origin}: "
    return RecipeError(
        f"{where}{key} = {value!r}: this is no list of {plural(count, 'number')}",
        hint=f"{key} takes a list of {plural(count, 'number')}{example}",
    )


def _values_of_list(loc: tuple[int | str, ...]) -> Mapping[str, Any] | None:
    """Return the JSON Schema of the list of fixed length that is at a place, or has one of its values there."""
    schema: Mapping[str, Any] = Recipe.model_json_schema()
    nodes = [schema]
    for part in loc[:-1] if isinstance(loc[-1], int) else loc:
        options = [option for node in nodes for option in _alternatives(node, schema)]
        tagged = [o for o in options if part in _tags(o)]  # the kind of a section that has several classes
        inner = [o.get("items") if isinstance(part, int) else o.get("properties", {}).get(part) for o in options]
        nodes = tagged or [node for node in inner if node is not None]
    lists = [option for node in nodes for option in _alternatives(node, schema) if "prefixItems" in option]
    return lists[0] if len(lists) == 1 else None


def _tags(schema: Mapping[str, Any]) -> set[str]:
    """Return the names by which a section's class is chosen."""
    chosen = (schema.get("properties", {}).get(key, {}) for key in ("family", "kind"))
    return {value for field in chosen for value in (field.get("const"), *field.get("enum", ())) if value}


def _field_path(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the path of an invalid field, without the tag of a section that has several classes."""
    return (loc[0], *loc[2:]) if loc[:1] in (("model",), ("objective",)) and len(loc) > 1 else loc


def _origin(key: str, origins: Mapping[str, str]) -> str | None:
    """Return where a key came from; if it was not given itself, the origin of a parent or a child."""
    parts = key.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    # A setting inside is not to blame: the caller knows which one is, if any.
    inside = (name for name in origins if name.startswith(f"{key}.") and not origins[name].startswith("--set "))
    return next((origins[name] for name in (*around, *inside) if name in origins), None)


def _allowed(key: str) -> str | None:
    """Describe the allowed values of a field, from its JSON Schema."""
    schema = Recipe.model_json_schema()
    nodes = [schema]
    for part in key.split("."):
        options = [option for node in nodes for option in _alternatives(node, schema)]
        inner = [o.get("items") if part.isdecimal() else o.get("properties", {}).get(part) for o in options]
        nodes = [node for node in inner if node is not None]
    options = [option for node in nodes for option in _alternatives(node, schema) if option.get("type") != "null"]
    values = [value for o in options for value in o.get("enum", [o["const"]] if "const" in o else [])]
    if values:
        return "one of " + ", ".join(map(str, dict.fromkeys(values)))
    descriptions = {_describe(option) for option in options}
    return descriptions.pop() if len(descriptions) == 1 else None


def _alternatives(node: Mapping[str, Any], schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives of a JSON Schema node, with references resolved."""
    if "$ref" in node:
        return _alternatives(schema["$defs"][node["$ref"].rsplit("/", 1)[1]], schema)
    options = node.get("anyOf") or node.get("oneOf")
    return [alternative for option in options for alternative in _alternatives(option, schema)] if options else [node]


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
