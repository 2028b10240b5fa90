"""Headway's own trainer as the planner sees it: what its step does, for a recipe on some devices.

Facts of this version, to be changed with `train/` and `parallel/`: FSDP2 over all devices, float32 weights and
moments, bfloat16 by autocast on one device and by FSDP's policy on several, a loss made in chunks, the host never
waiting for a step.
"""

from headway.hardware import Chip
from headway.plan.settings import Software
from headway.recipe import Recipe

__all__ = ["own_software", "trainer_precision", "trainer_software"]

LOOP_S = 0.012
"""Host seconds of a step beside its layers, embedding and loss to optimizer: measured on an H200's host."""
ROTARY_PASSES = {False: 24.0, True: 2.0}
"""Passes over queries and keys of the rotary embedding, as it stands and compiled: it is written out in float32."""


def trainer_precision(recipe: Recipe) -> str:
    """Of the matrix products."""
    return "bf16" if recipe.train.dtype == "bfloat16" else "float32"


def trainer_software(recipe: Recipe, chip: Chip, devices: int) -> Software:
    """What the trainer's step does with a recipe on so many devices of a kind."""
    casts = recipe.train.dtype == "bfloat16" and devices == 1
    older = chip.name.startswith(("a100", "l40s", "rtx", "cpu"))
    return own_software(compiled=recipe.train.compile, casts=casts, older=older)


def own_software(*, compiled: bool, casts: bool, older: bool) -> Software:
    """What the trainer's step does: compiled or not, casting weights at each use or not, on a chip before Hopper or
    not."""
    return Software(
        fusion="compiled" if compiled else "eager",
        attention="flash2" if older else "cudnn",
        loss="chunked",
        rotary_passes=ROTARY_PASSES[compiled],
        separate_products=True,
        casts_weights=casts,
        stream_bytes=4 if casts else 2,
        weight_bytes=4,
        master_bytes=0,
        moment_bytes=4,
        gradient_bytes=4,
        reduce_bytes=4,
        recompute_host=2.5,
        waits=False,
        loop_s=LOOP_S,
    )
