"""From a recipe to a started run: resolve and check the recipe, plan it, start the launcher."""
