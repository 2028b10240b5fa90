"""The inference section of a recipe: how engines that sample from the run's model compute."""

from headway.recipe.section import Section


class Inference(Section):
    """How the engine runs the model, in the run itself and from its checkpoints."""

    exact: bool = False
    """Log-probabilities of generated tokens have the bits of the trainer's forward pass over the same tokens; both then
    run on kernels whose rows do not depend on the batch. Float32 on CPUs."""
