"""`python -m headway.inference.sample_media`: the process behind `headway sample` of a diffusion run.

Reads one request, a JSON object, from stdin, generates samples and writes them as one file. Streams JSON lines to
stdout: {"samples", "of"} as it goes on, {"file", ...} at the end, or {"error", "hint"} and the error's exit status.
"""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.data.media.decode import Undecodable, open_image, reason_of
from headway.data.media.order import cover
from headway.data.media.pictures import write_samples
from headway.errors import DataError
from headway.inference.load_diffusion import DiffusionRequest
from headway.inference.request_process import answer_request
from headway.models.pixels import to_pixels, to_samples
from headway.recipe.families.diffusion import DiffusionModel
from headway.state.parent_process import end_with_parent

BATCH = 64
"""Samples that are generated at once."""
BICUBIC = 3
"""Pillow's number of the filter that images of a dataset are scaled with, too."""


class MediaSampleRequest(DiffusionRequest):
    """A checkpoint, conditions and sampling options."""

    conditions: list[int] | list[str]
    """Classes or prompts, one per sample."""
    out: Path
    size: tuple[int, int, int] | None = None
    """Width, height and frames; by default those of the data's first bucket."""
    fps: int = 8
    image: Path | None = None
    """What videos begin with, of an image-to-video model."""


def generate(request: MediaSampleRequest) -> Iterator[dict[str, Any]]:
    """Generate samples and write them; yield what to report."""
    recipe, generator = request.load()
    assert isinstance(recipe.model, DiffusionModel)
    assert recipe.data.media is not None
    width, height, frames = request.size or recipe.data.media.shapes[0]
    recipe.model.grid(frames, height, width)
    given = None if request.image is None else read_image(request.image, (width, height), recipe.model.in_channels)
    parts, total = list[torch.Tensor](), len(request.conditions)
    for first in range(0, total, BATCH):
        conditions = request.conditions[first : first + BATCH]
        images = None if given is None else given.expand(len(conditions), -1, frames, -1, -1)
        samples = generator.generate(conditions, (frames, height, width), request.sampling, first, images=images)
        parts.append(to_pixels(samples).cpu())
        yield {"samples": first + len(conditions), "of": total}
    write_samples(request.out, torch.cat(parts).numpy(), fps=request.fps)
    yield {"file": str(request.out), "width": width, "height": height, "frames": frames}


def read_image(file: Path, size: tuple[int, int], channels: int) -> torch.Tensor:
    """Return an image as a sample of one frame [1, C, 1, Y, X], scaled to cover a width and height and cut at its
    center."""
    try:
        image = open_image(file.read_bytes())
    except (Undecodable, OSError) as error:
        raise DataError(f"cannot read {file}: {reason_of(error)}", hint="--image takes a PNG or JPEG") from None
    width, height = cover(image.size, size)
    left, top = (width - size[0]) // 2, (height - size[1]) // 2
    resized = image.resize((width, height), resample=BICUBIC) if image.size != (width, height) else image
    pixels = np.array(resized)[top : top + size[1], left : left + size[0]]
    return to_samples(torch.from_numpy(pixels)[None, None], channels)


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM, *map(int, sys.argv[1:]))
    sys.exit(answer_request(MediaSampleRequest, generate))
