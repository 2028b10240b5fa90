"""How many tokens a sample of images or video is: what `data.seq` is for a diffusion model."""

from headway.errors import ModelError, RecipeError
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.families.wan import Wan
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
    _check_images(model)
    try:
        tokens = max(model.tokens(frames, height, width) for width, height, frames in media.shapes)
    except ModelError as error:
        raise RecipeError(f"data.media: {error.message}", hint=error.hint) from None
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"seq": tokens})})


def _check_images(model: DiffusionModel) -> None:
    """Raise RecipeError for an image-to-video model that pixels cannot train."""
    beside = model.beside_channels
    if 0 < beside <= model.in_channels:
        raise RecipeError(
            f"model.image_channels is {beside}: the first frame has {model.in_channels}, and its mask at least one",
            hint=f"--set model.image_channels={model.in_channels + 1}",
        )
    if isinstance(model, Wan) and model.image_dim is not None:
        raise RecipeError(
            f"model.image_dim is {model.image_dim}, but training has no image encoder", hint="leave image_dim out"
        )
