"""The part of `headway sample` that generates images and video with a diffusion run.

The model runs in another process (`headway.inference.sample_media`), which also writes the file.
"""

import json
import re
import sys
from collections.abc import Sequence
from itertools import count as counted
from pathlib import Path
from typing import Any

from headway.cli.model_process import model_process
from headway.cli.progress import terminal_bars
from headway.data.media.pictures import check_suffix
from headway.errors import UsageError, plural
from headway.recipe import Recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.track import RunFolder, read_recipe

_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})(?:x([1-9]\d{0,3}))?")


def diffusion_recipe(source: dict[str, str]) -> Recipe | None:
    """Return the recipe of a run of a diffusion model; None for other models."""
    if "run" not in source:
        return None
    recipe = read_recipe(RunFolder(Path(source["run"])))
    return recipe if isinstance(recipe.model, DiffusionModel) else None


def sample_media(
    name: str,
    source: dict[str, str],
    recipe: Recipe,
    *,
    prompts: Sequence[str],
    labels: Sequence[int],
    count: int | None,
    size: str | None,
    out: Path | None,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Generate samples of classes or prompts into a file, and say where it is."""
    assert recipe.data.media is not None
    frames = recipe.data.media.shapes[0][2]
    shape = None if size is None else _shape(size, frames)
    video = (frames if shape is None else shape[2]) > 1
    out = out or _free_name(name.replace("@", "-"), ".mp4" if video else ".png")
    check_suffix(out, video=video)
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out.parent} is not a folder", hint="make it, or name another --out")
    conditions = _conditions(recipe, prompts, labels, count)
    given = {key: value for key, value in settings.items() if value is not None}
    request = {**source, "conditions": conditions, "out": str(out.absolute()), "size": shape, **given}
    written = _generate(request)
    if as_json:
        values = {"model": name, "file": str(out), "samples": len(conditions), "conditions": conditions}
        print(json.dumps({**values, **{key: written[key] for key in ("width", "height", "frames")}}))
        return
    each = f"{written['width']}x{written['height']}" + (f"x{written['frames']}" if video else "")
    print(f"{out}: {plural(len(conditions), 'sample')} of {each} from {name}")


def _conditions(
    recipe: Recipe, prompts: Sequence[str], labels: Sequence[int], count: int | None
) -> list[int] | list[str]:
    """Return a class or prompt per sample, in turn."""
    model = recipe.model
    assert isinstance(model, DiffusionModel)
    if model.conditioning == "class":
        if prompts:
            raise UsageError("the model is conditioned on classes, not on texts", hint="use --label N")
        assert model.num_classes is not None
        for label in labels:
            if not 0 <= label < model.num_classes:
                raise UsageError(f"there is no class {label}", hint=f"--label takes 0 to {model.num_classes - 1}")
        chosen = list(labels) or list(range(model.num_classes))
        return [chosen[number % len(chosen)] for number in range(count or len(chosen))]
    if labels:
        raise UsageError("the model is conditioned on texts, not on classes", hint="use --prompt TEXT")
    texts = list(prompts) or [""]
    return [texts[number % len(texts)] for number in range(count or len(texts))]


def _free_name(stem: str, suffix: str) -> Path:
    """Return a file of this folder that does not exist: STEM, STEM-2, STEM-3 and so on."""
    names = (Path(f"{stem}{f'-{number}' if number > 1 else ''}{suffix}") for number in counted(1))
    return next(name for name in names if not name.exists())


def _shape(size: str, frames: int) -> tuple[int, int, int]:
    matched = _SIZE.fullmatch(size)
    if matched is None:
        raise UsageError(f"--size {size} is not WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES", hint="for example --size 64x64")
    width, height, given = matched.groups()
    return int(width), int(height), int(given or frames)


def _generate(request: dict[str, Any]) -> dict[str, Any]:
    """Run the sampling process, with a progress bar on a terminal; return its last message."""
    messages = list[dict[str, Any]]()
    with model_process("headway.inference.sample_media", "sampling", request) as running:
        if not sys.stderr.isatty():
            messages += running.messages()
        else:
            columns = ("{task.description}", "Bar", "{task.completed:,}/{task.total:,}", "TimeRemaining")
            with terminal_bars(*columns) as bars:
                task = bars.add_task("sampling", total=len(request["conditions"]))
                for message in running.messages():
                    messages.append(message)
                    bars.update(task, completed=message.get("samples", 0))
    return messages[-1]
