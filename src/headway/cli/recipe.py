"""`headway recipe show | schema`: what a recipe says once everything is filled in, and what it may say."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json, Settings

__all__ = ["app"]

app = typer.Typer(help="Show a resolved recipe, or the schema of all recipes.", no_args_is_help=True)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A recipe in TOML.")],
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Print the resolved recipe: every key, with what it extends and --set applied."""
    from headway.recipe import load_recipe, to_toml

    recipe = load_recipe(file, settings or ())
    print(recipe.model_dump_json(indent=2) if json else to_toml(recipe))


@app.command()
def schema(json: Json = True) -> None:  # noqa: ARG001 - it is JSON anyway, but every verb takes --json
    """Print the JSON Schema of recipes, for editors."""
    from headway.cli.text import print_json
    from headway.recipe.documentation import recipe_schema

    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema"} | recipe_schema())
