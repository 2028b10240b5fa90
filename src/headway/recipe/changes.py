"""Which settings may change when a run is resumed."""

import json
import re
from collections.abc import Callable
from typing import Any

from headway.errors import RecipeError
from headway.recipe.load import leaves
from headway.recipe.model import ModelLayout
from headway.recipe.sample_settings import SampleGrid
from headway.recipe.schema import Checkpoint, Eval, Health, Parallel, Recipe, Store
from headway.recipe.section import Section
from headway.recipe.track import MLflow, TensorBoard, Track, Wandb, Webhook

_TRACKERS: dict[str, type[Section]] = {"mlflow": MLflow, "wandb": Wandb, "tensorboard": TensorBoard, "webhook": Webhook}
_TRACK = (
    *(f"track.{key}" for key in Track.model_fields if key not in _TRACKERS),
    *(f"track.{name}.{key}" for name, section in _TRACKERS.items() for key in section.model_fields),
)

CHANGEABLE = {
    "train.steps": "train longer or stop earlier (a cosine's remaining steps follow the new length)",
    "train.microbatch": "same gradients up to rounding",
    "train.recompute": "same gradients, other memory",
    "train.recompute_blocks": "same gradients, other memory",
    "train.memory_gb": "same gradients, other memory",
    "train.offload_optimizer": "same gradients, other memory",
    "train.compile": "same gradients up to rounding",
    "train.update_in_backward": "same gradients, other memory",
    "train.cuda_graphs": "same gradients, less host work",
    "train.plain": "same gradients up to rounding",
    "train.deterministic": "slower, reproducible kernels",
    "train.device": "same state on another kind of device",
    "train.restarts": "patience only",
    "train.fewest_workers": "patience only",
    "train.silent_node_s": "patience only",
    "train.join_s": "patience only",
    "train.timeout_s": "patience only",
    "train.rate_cuts": "only steps from the cut on change",
    "train.schedule": "only future steps change: decay can start at any step",
    "train.decay_steps": "length of a wsd schedule's decay",
    "train.decay": "shape of the decay",
    "train.min_lr_ratio": "final learning rate",
    **{
        f"parallel.{key}": "the state is resharded exactly; same gradients up to rounding"
        for key in Parallel.model_fields
    },
    **{
        f"model.layout.{key}": "how a custom model is parallelized; same gradients up to rounding"
        for key in ModelLayout.model_fields
    },
    "rl.generators": "the same samples, at other times",
    "inference.exact": "same gradients up to rounding",
    "data.path": "the folder may move; its version must stay",
    "data.mixture.*.path": "the folder may move; its version must stay",
    "data.media.decoders": "the same samples, decoded elsewhere",
    "data.skip": "only future steps see other samples",
    **{f"eval.{key}": "measurement only" for key in Eval.model_fields if key != "samples"},
    **{f"eval.samples.{key}": "measurement only" for key in SampleGrid.model_fields},
    **{f"checkpoint.{key}": "durability only" for key in Checkpoint.model_fields},
    **{f"checkpoint.store.{key}": "durability only" for key in Store.model_fields},
    "callbacks": "told about steps, changes none",
    **dict.fromkeys(_TRACK, "sends metrics elsewhere only"),
    **{f"health.{key}": "monitoring only; its effects are recorded" for key in Health.model_fields},
}
"""Why each dotted key is safe to change in the middle of a run."""
_INSTEAD = {
    "train.lr": "train.rate_cuts lowers it from a step on; ",
    "train.batch": "train.microbatch may change; ",
    "seed": "data.skip skips samples; ",
}
"""What may change and has a similar effect."""
_ANY_DATA_SET = re.compile(r"^data\.mixture\.[^.]+\.")


def changed_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys whose values differ, with both values; a missing section counts as its defaults."""
    before, after = (dict(leaves(_with_defaults(recipe))) for recipe in (old, new))
    keys = [*before, *(key for key in after if key not in before)]
    pairs = {key: (before.get(key), after.get(key)) for key in keys}
    return {key: (old_value, new_value) for key, (old_value, new_value) in pairs.items() if old_value != new_value}


def _with_defaults(recipe: Recipe) -> dict[str, Any]:
    model = recipe.model.model_copy(update={"layout": recipe.model.layout or ModelLayout()})
    return recipe.model_copy(update={"model": model, "parallel": recipe.parallel or Parallel()}).model_dump()


def check_resumable(
    old: Recipe,
    new: Recipe,
    run: str | None = "RUN",
    reached: int = 0,
    train_command: Callable[[str], str] = "headway train {}".format,
) -> dict[str, tuple[Any, Any]]:
    """Return the changes; raise RecipeError for the first that resuming `run` does not allow.

    The hint is a `train_command` that starts another run: from this one, unless `run` is None since it has saved
    nothing; with more steps if it has `reached` its last.
    """
    changed = changed_keys(old, new)
    refused = [key for key in changed if not _is_changeable(key)]
    if refused:
        key, (old_value, new_value) = refused[0], changed[refused[0]]
        steps = 2 * reached if reached and reached >= new.train.steps else None
        raise RecipeError(
            f"{key} cannot change when a run is resumed (is {old_value!r}, requested {new_value!r})",
            hint=f"{_new_run(key, new_value, run, steps, train_command)}; "
            f"{_INSTEAD.get(key, '')}headway resume --help lists what may change",
        )
    return changed


def changeable_keys() -> list[str]:
    """Return the keys that may change, with one pattern for a section of which all may."""
    whole = ("parallel", "model.layout", "eval", "checkpoint", "health", "track")
    keys = [key for key in CHANGEABLE if not any(key.startswith(f"{section}.") for section in whole)]
    return [*keys, *(f"{section}.*" for section in whole)]


def _is_changeable(key: str) -> bool:
    return key.partition(".")[0] == "track" or _ANY_DATA_SET.sub("data.mixture.*.", key) in CHANGEABLE


def _new_run(key: str, value: Any, run: str | None, steps: int | None, train_command: Callable[[str], str]) -> str:
    """Return the command that trains with a value that resuming refuses, and that is not itself refused."""
    more = "" if steps is None else f" --set train.steps={steps}"
    text = "" if value is None else json.dumps(value)
    setting = f"--set {key}={text.strip(chr(34)) if isinstance(value, str) else text}"
    if isinstance(value, dict | list | tuple):
        setting = f"--set {key}=..."
    if run is None:
        return f"this run has saved nothing: {train_command(f'RECIPE {setting}')} starts a new one"
    if key.startswith("model."):
        return f"another model is another run: {train_command(f'RECIPE {setting}')}"
    if key in ("train.optimizer", "train.freeze"):  # the optimizer's state would not fit
        return f"{train_command(f'RECIPE --set model.init={run} {setting}')} starts a new run from its weights"
    if key.startswith("data.") and key.endswith("version"):
        branch = train_command(f"--from {run} {setting} --set data.path=FOLDER{more}")
        return f"{branch} starts a new run on other data"
    if key == "name":
        return f"{train_command(f'--from {run} --name NAME{more}')} starts a new run"
    return f"{train_command(f'--from {run} {setting}{more}')} starts a new run"
