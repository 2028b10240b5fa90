"""Writes docs/reference/ from the code: recipe.md from the recipe's JSON Schema, cli.md from the commands themselves.

python docs/generate.py          write the files
python docs/generate.py --check  exit 1 when they are not what the code says now
"""

import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer.main

from headway.cli.main import app
from headway.recipe import CHANGEABLE
from headway.recipe.documentation import recipe_schema

FOLDER = Path(__file__).resolve().parent / "reference"
WIDTH = 110
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
NOUNS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "string",
    "object": "table",
}
NOTE = "Made by `python docs/generate.py`; do not edit."


def main() -> int:
    """Write or check the reference."""
    stale = []
    for name, text in pages().items():
        path = FOLDER / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv[1:]:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print("\n".join(f"{name}: {'stale' if '--check' in sys.argv[1:] else 'written'}" for name in stale) or "up to date")
    return 1 if stale and "--check" in sys.argv[1:] else 0


def pages() -> dict[str, str]:
    """Every page of the reference by file name."""
    return {"recipe.md": "\n".join(recipe_page()) + "\n", "cli.md": "\n".join(cli_page()) + "\n"}


# -- recipe.md

MODEL = "The decoder to train, of a family and in plain numbers; or a class of your own. Keys of a family that are not \
listed with it are the common ones; defaults are the first family's where families differ."


def recipe_page() -> Iterator[str]:
    """Every key of a recipe, section by section, and what resume may change."""
    schema = recipe_schema()
    yield from ("# Recipe", "", NOTE, "", schema["description"], "")
    sections = {name: field for name, field in schema["properties"].items() if reference(field) or "oneOf" in field}
    plain = {name: field for name, field in schema["properties"].items() if name not in sections}
    yield from keys("", plain, schema)
    for name, field in sections.items():
        ref = reference(field)
        yield from families(name, field, schema) if ref is None else section_of(name, ref, schema, "##")
    yield from ("", "## What may change when a run is resumed", "")
    for key, why in CHANGEABLE.items():
        yield from item(f"`{key}`: {why}.")


def section_of(name: str, ref: str, schema: dict[str, Any], mark: str, title: str = "") -> Iterator[str]:
    """One section, its keys, and the sections inside it."""
    section = definition(ref, schema)
    inner = {key: field for key, field in section["properties"].items() if reference(field)}
    yield from heading(f"{mark} {title or f'[{name}]'}", section)
    plain = {key: field for key, field in section["properties"].items() if key not in inner}
    yield from keys(f"{name}.", plain, section)
    for key, field in inner.items():
        inside, shown = f"{name}.{key}", f"[{name}.{key}]"
        if any("items" in option for option in field.get("anyOf", [field])):
            shown = f"[[{name}.{key}]]"
        elif any("additionalProperties" in option for option in field.get("anyOf", [field])):
            inside, shown = f"{inside}.NAME", f"[{name}.{key}.NAME]"
        yield from section_of(inside, reference(field) or "", schema, f"{mark}#", shown)


def families(name: str, field: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    """A section of one of several kinds: what all of them have, then what is each one's own."""
    found = {option["$ref"]: definition(option["$ref"], schema) for option in field["oneOf"]}
    decoders = {ref: one for ref, one in found.items() if family_of(one) != "own"}
    common = common_keys(list(decoders.values()))
    first = next(iter(decoders.values()))
    yield from ("", f"## [{name}]", "", *textwrap.wrap(MODEL, WIDTH), "")
    names = ", ".join(toml(family_of(one)) for one in decoders.values())
    yield from item(f'`{name}.family` (one of {names}, default "llama"): Which family of decoders it is of.')
    shared = {key: value for key, value in first["properties"].items() if key in common}
    yield from keys(f"{name}.", {key: value for key, value in shared.items() if not reference(value)}, first)
    for one in decoders.values():
        yield from heading(f'### family = "{family_of(one)}"', one)
        own = {key: value for key, value in one["properties"].items() if key not in common and key != "family"}
        yield from keys(f"{name}.", {key: value for key, value in own.items() if not reference(value)}, one)
    scaling = next(ref for one in decoders.values() if (ref := reference(one["properties"].get("rope_scaling", {}))))
    yield from section_of(f"{name}.rope_scaling", scaling, schema, "###")
    layout = reference(shared["layout"])
    assert layout is not None, "a class of the user's own has a layout"
    yield from section_of(f"{name}.layout", layout, schema, "###")


def common_keys(sections: list[dict[str, Any]]) -> set[str]:
    """Keys that mean the same in all sections; a default may be another."""
    kept = set(sections[0]["properties"]) - {"family"}
    for one in sections[1:]:
        kept &= {
            key
            for key, value in one["properties"].items()
            if key in kept and value["description"] == sections[0]["properties"][key]["description"]
        }
    return kept


def family_of(section: dict[str, Any]) -> str:
    """The name that a recipe has for it."""
    return str(section["properties"]["family"]["const"])


def heading(title: str, section: dict[str, Any]) -> Iterator[str]:
    """A title and what stands below it."""
    yield from ("", title, "", *textwrap.wrap(" ".join(section["description"].split()), WIDTH), "")


def definition(ref: str, schema: dict[str, Any]) -> dict[str, Any]:
    """What a reference refers to."""
    found: dict[str, Any] = schema["$defs"][ref.rsplit("/", 1)[1]]
    return found


def reference(field: dict[str, Any]) -> str | None:
    """The definition that a section's field, or a list or table of them, refers to; None for a plain key."""
    for option in field.get("anyOf", [field]):
        for place in (option, option.get("items"), option.get("additionalProperties")):
            if isinstance(place, dict) and "$ref" in place:
                return str(place["$ref"])
    return None


def keys(prefix: str, fields: dict[str, Any], section: dict[str, Any]) -> Iterator[str]:
    """One list item a key: what it takes, its default, its meaning."""
    for name, field in fields.items():
        parts = [takes(field)]
        if name in section.get("required", ()):
            parts.append("required")
        elif field.get("default") not in (None, [], {}):
            parts.append(f"default {toml(field['default'])}")
        yield from item(f"`{prefix}{name}` ({', '.join(parts)}): {' '.join(field['description'].split())}")


def takes(field: dict[str, Any]) -> str:
    """The values that a key takes, in words."""
    options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    return " or ".join(one_kind(option) for option in options)


def one_kind(schema: dict[str, Any]) -> str:
    """One kind of value in words."""
    if "enum" in schema:
        return "one of " + ", ".join(toml(value) for value in schema["enum"])
    if "prefixItems" in schema.get("items", {}):
        return f"list of [{', '.join(one_kind(part) for part in schema['items']['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"list of {one_kind(schema['items'])}s" if "pattern" not in schema["items"] else "list of names"
    bounds = [f"{word} {schema[name]:g}" for name, word in BOUNDS.items() if name in schema]
    pattern = [f"matching `{schema['pattern']}`"] if "pattern" in schema else []
    return " ".join([NOUNS[schema["type"]], " and ".join(bounds), *pattern]).replace("  ", " ").strip()


def toml(value: Any) -> str:
    """A default as a recipe would say it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


# -- cli.md


def cli_page() -> Iterator[str]:
    """Every verb with its arguments and options."""
    root = typer.main.get_command(app)
    yield from ("# Command line", "", NOTE, "", root.help or "", "")
    yield from parameters(root)
    for path, command in verbs(root):
        yield from ("", f"## {path}", "", textwrap.fill(" ".join((command.help or "").split()), 110), "")
        yield from ("```", " ".join([path, *usage(command)]), "```", "")
        yield from parameters(command)


def verbs(group: Any, path: str = "headway") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its full name, in the order of the help."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def usage(command: Any) -> Iterable[str]:
    """The words after a command's name."""
    if any(parameter.param_type_name == "option" for parameter in command.params):
        yield "[OPTIONS]"
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            word = placeholder(command, parameter)
            yield word if parameter.required else f"[{word}]"


def parameters(command: Any) -> Iterator[str]:
    """One list item an argument or option."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield from item(f"`{placeholder(command, parameter)}`: {parameter.help}")
    for parameter in command.params:
        if parameter.param_type_name == "option":
            names = ", ".join([*parameter.opts, *parameter.secondary_opts])
            value = "" if parameter.is_flag else f" {placeholder(command, parameter)}"
            default = "" if parameter.is_flag or parameter.default is None else f" Default: {parameter.default}."
            yield from item(f"`{names}{value}`: {parameter.help}{default}")


def placeholder(command: Any, parameter: Any) -> str:
    """The word that stands for a parameter's value: as the signature says, not as a version of Typer shows it."""
    if parameter.metavar:
        return str(parameter.metavar)
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    hint = get_type_hints(inspect.unwrap(command.callback))[parameter.name]
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if get_origin(hint) is Literal:
        return "|".join(map(str, kinds))
    return {int: "N", float: "X", Path: "PATH"}.get(kinds[0], "TEXT")


def item(text: str) -> list[str]:
    """A list item, wrapped."""
    return textwrap.wrap(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
