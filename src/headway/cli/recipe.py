"""`headway recipe ls | cp | show | schema`: the recipes that come with Headway, a resolved one, the schema of all."""

import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json, Settings
from headway.cli.text import print_json
from headway.errors import UsageError
from headway.recipe import load_recipe, to_toml
from headway.recipe.documentation import recipe_schema
from headway.recipe.shipped import shipped_file, shipped_files, with_bases

app = typer.Typer(help="List, copy and show recipes, or print their schema.", no_args_is_help=True)


def complete_name() -> list[str]:
    """Return the names of the recipes that come with Headway, for shell completion."""
    return [file.name for file in shipped_files()]


@app.command("ls")
def ls_command(json: Json = False) -> None:
    """List the recipes and cluster files that come with Headway."""
    files = shipped_files()
    if json:
        print_json([{"name": file.name, "path": str(file.path), "summary": file.summary} for file in files])
        return
    width = max(len(file.name) for file in files) + 2
    columns = min(100, shutil.get_terminal_size().columns)
    for file in files:
        lines = textwrap.wrap(file.summary, max(20, columns - width), break_on_hyphens=False)
        print(f"{file.name:{width}}" + f"\n{'':{width}}".join(lines))
    print("\nnext: headway recipe cp NAME")


@app.command("cp")
def cp_command(
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=complete_name, help="One of `recipe ls`.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder, or a file ending in .toml.")] = Path(),
    json: Json = False,
) -> None:
    """Copy a recipe that comes with Headway, and what it extends.

    Prints the commands to run next. A file that exists and differs is not replaced.
    """
    file = shipped_file(name)
    folder = dest.parent if dest.suffix == ".toml" else dest
    first, *bases = with_bases(file.path)
    copies = {first: dest if dest.suffix == ".toml" else dest / first.name} | {
        base: folder / base.name for base in bases
    }
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="DEST is a folder, or a file ending in .toml")
    contents = {copy: original.read_bytes() for original, copy in copies.items()}
    for copy, content in contents.items():
        if copy.exists() and (not copy.is_file() or copy.read_bytes() != content):
            raise UsageError(f"{copy} exists and differs", hint=f"headway recipe cp {name} DEST copies it elsewhere")
    folder.mkdir(parents=True, exist_ok=True)
    for copy, content in contents.items():
        copy.write_bytes(content)
    commands = file.commands(copies[first])
    if json:
        print_json({"files": [str(copy) for copy in contents], "next": commands})
        return
    print("\n".join(map(str, contents)))
    print("next: " + "\n      ".join(commands))
    for script in (command.split()[1] for command in commands if command.startswith("python ")):
        if not Path(script).exists():
            print(f"note: {script} is a file of Headway's repository, not of the wheel", file=sys.stderr)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A recipe in TOML.")],
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Show the resolved recipe: every key, after `extends` and --set."""
    recipe = load_recipe(file, settings or ())
    print(recipe.model_dump_json(indent=2) if json else to_toml(recipe))


@app.command()
def schema(json: Json = True) -> None:  # noqa: ARG001 - always JSON, but every verb takes --json
    """Print the JSON Schema of recipes, for editors."""
    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema"} | recipe_schema())
