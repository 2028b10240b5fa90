"""`headway recipe show | schema`: a resolved recipe, and the schema of all recipes."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json, Settings
from headway.cli.text import print_json
from headway.recipe import load_recipe, to_toml
from headway.recipe.documentation import recipe_schema

app = typer.Typer(help="Show a resolved recipe or the recipe schema.", no_args_is_help=True)


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
