"""`python -m headway.inference.evaluate_images`: the process behind `headway eval RUN --frechet FOLDER`.

Generates as many samples as it reads real ones, of the same classes or captions, and compares their features. Streams
JSON lines to stdout: {"samples", "of"} as it goes on, {"frechet", ...} at the end, or {"error", "hint"}.
"""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.data.media.corpus import open_media_corpus
from headway.errors import DataError, plural
from headway.inference.frechet import frechet_distance, moments
from headway.inference.image_features import FeatureNetwork
from headway.inference.load_diffusion import DiffusionRequest
from headway.inference.request_process import answer_request
from headway.models.pixels import to_pixels, to_samples
from headway.recipe.families.diffusion import DiffusionModel
from headway.state.parent_process import end_with_parent

BATCH = 64


class FrechetRequest(DiffusionRequest):
    """A checkpoint, a feature network, and how many samples to compare."""

    network: Path
    """Folder of a CLIP model."""
    samples: int


def compare(request: FrechetRequest) -> Iterator[dict[str, Any]]:
    """Compare generated samples with real ones; of videos, all frames."""
    recipe, generator = request.load()
    assert isinstance(recipe.model, DiffusionModel)
    corpus = open_media_corpus(recipe)
    order, classes = corpus.order, recipe.model.conditioning == "class"
    rows = order.rows_per_epoch // order.batch * order.batch
    available = sum(len(order.numbers(cursor)) for cursor in range(0, rows, order.batch))
    if request.samples > available:
        what = plural(available, "sample")
        raise DataError(f"an epoch of the data has {what}, not {request.samples:,}", hint=f"--limit {available}")
    network = FeatureNetwork(request.network)
    real, generated, done, cursor = list[torch.Tensor](), list[torch.Tensor](), 0, 0
    while done < request.samples:
        numbers = order.numbers(cursor)[: request.samples - done]
        cursor += order.batch
        media = corpus.reader.read(numbers)
        assert media.labels is not None or not classes, "checked before"
        conditions = media.labels.tolist() if classes and media.labels is not None else media.captions
        real.append(network.features(torch.from_numpy(media.pixels).flatten(0, 1)))
        frames, height, width = media.pixels.shape[1:4]
        for first in range(0, len(numbers), BATCH):
            part = conditions[first : first + BATCH]
            images = None
            if recipe.model.beside_channels:
                pixels = torch.from_numpy(media.pixels[first : first + BATCH])
                images = to_samples(pixels, recipe.model.in_channels)
            samples = generator.generate(part, (frames, height, width), request.sampling, done + first, images=images)
            generated.append(network.features(to_pixels(samples).cpu().flatten(0, 1)))
        done += len(numbers)
        yield {"samples": done, "of": request.samples}
    generated_NF, real_NF = (torch.cat(parts).numpy() for parts in (generated, real))
    yield {
        "frechet": frechet_distance(moments(generated_NF), moments(real_NF)),
        "halves": distance_of_halves(real_NF, done),
        "samples": done,
        "images": len(generated_NF),
        "data": corpus.version,
    }


def distance_of_halves(features_ND: np.ndarray, samples: int) -> float | None:
    """Return the distance between two halves of the real samples, which a model can hardly be below; None for few."""
    first, second = np.array_split(features_ND.reshape(samples, -1, features_ND.shape[-1]), 2)
    if samples < 4:
        return None
    return frechet_distance(*(moments(half.reshape(-1, half.shape[-1])) for half in (first, second)))


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM, *map(int, sys.argv[1:]))
    sys.exit(answer_request(FrechetRequest, compare))
