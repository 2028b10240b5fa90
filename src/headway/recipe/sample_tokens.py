"""How many tokens a sample of images or video is: what `data.seq` is for a diffusion model."""

from headway.errors import ModelError, RecipeError
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.schema import Recipe


def with_sample_tokens(recipe: Recipe) -> Recipe:
    """Return a diffusion recipe whose data.seq is the patches of its largest samples; raise RecipeError for sizes that
    the model does not take."""
    model, media = recipe.model, recipe.data.media
    assert isinstance(model, DiffusionModel)
    assert media is not None, "a diffusion model trains on images or video"
    if model.in_channels not in (1, 3):
        raise RecipeError(
            f"model.in_channels is {model.in_channels}, but pixels have 3 channels",
            hint="--set model.in_channels=3, or 1 for gray",
        )
    try:
        tokens = max(model.tokens(frames, height, width) for width, height, frames in media.shapes)
    except ModelError as error:
        raise RecipeError(f"data.media: {error.message}", hint=error.hint) from None
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"seq": tokens})})
