"""The inference section of a recipe: how a run's model computes, where engines sample from it."""

from headway.recipe.section import Section


class Inference(Section):
    """How the model and the engines in the run compute tokens."""

    exact: bool | None = None
    """Compute each token alike in every batch, in training and inference: an engine that is exact, too, then reports
    log-probabilities with the bits of the trainer's own. In float32 on CPUs, in bfloat16 on GPUs. By default a run of
    reinforcement learning with a dense model in bfloat16 on a GPU is exact, where it costs a few percent."""
