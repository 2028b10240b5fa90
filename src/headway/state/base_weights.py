"""The frozen base of adapters: its weights, and a digest of them by which a run recognizes it.

The digest is that of a checkpoint's model tensors, so that a Hugging Face folder and the run that was imported from it
are the same base.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headway.errors import ModelError
from headway.recipe import Lora, Model
from headway.recipe.huggingface import read_model
from headway.recipe.upgrade import upgrade_recipe
from headway.state.address import open_address
from headway.state.digest import state_digest
from headway.state.hf_import import tensor_digest
from headway.state.huggingface import LazyWeight, saved_weights, stored_weights
from headway.state.read_checkpoint import OpenCheckpoint

MODEL = "model/"


def model_at(address: str) -> Model:
    """Return the model of a Hugging Face folder or a checkpoint; raise ModelError if it has only adapters."""
    if (Path(address) / "config.json").is_file():
        return read_model(Path(address))
    recipe = upgrade_recipe(open_address(address).manifest.recipe)
    if recipe.lora is not None:
        raise ModelError(
            f"{address} has adapters only, not the weights of a model",
            hint="headway checkpoint merge RUN FOLDER makes a folder with all of them",
        )
    return recipe.model


def base_weights(init: str, model: Model) -> dict[str, LazyWeight]:
    """Open the weights of a base, a Hugging Face folder or a checkpoint, by Headway's names."""
    if (Path(init) / "config.json").is_file():
        return stored_weights(Path(init), model)
    return saved_weights(open_address(init), model.tensors() | model.buffers())


def base_digest(init: str, model: Model) -> str:
    """Return the digest of a base's weights; those of a folder are read."""
    if (Path(init) / "config.json").is_file():
        weights = stored_weights(Path(init), model)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="digest") as pool:
            digests = pool.map(tensor_digest, weights.values())
            return state_digest(
                (f"{MODEL}{name}", weight.dtype, weight.shape, digest)
                for (name, weight), digest in zip(weights.items(), digests, strict=True)
            )
    return checkpoint_digest(open_address(init))


def checkpoint_digest(checkpoint: OpenCheckpoint) -> str:
    """Return the digest of a checkpoint's weights."""
    return state_digest(
        (name, entry.dtype, entry.shape, int(entry.digest, 16))
        for name, entry in checkpoint.manifest.tensors.items()
        if name.startswith(MODEL)
    )


def check_base(lora: Lora, model: Model) -> None:
    """Raise ModelError if `model.init` no longer has the weights that a run's adapters were trained on."""
    assert model.init is not None, "adapters have a base"
    present = base_digest(model.init, model)
    if lora.base not in (None, present):
        raise ModelError(
            f"an adapter for another base: its base has digest {lora.base}, but {model.init} has {present}",
            hint="put the weights back that the run started from",
        )
